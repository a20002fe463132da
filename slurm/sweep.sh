#!/bin/bash
# Submit a scaling study, each run with a log of its own, and a report when all have ended.
#     bash slurm/sweep.sh --gpus "1 2 4 2x4" --batch_sizes "64 128" images --model cnn --epochs 3
#     bash slurm/sweep.sh --weak --gpus "1 2 4" --batch_sizes 64 --dry_run images
#     bash slurm/sweep.sh study agnews    # a study of results.md: agnews, imdb, gpt, mnist or six
# --gpus: numbers of GPUs of one node, NODESxGPUS, or GPUS/STAGES, with which hybrid/images.py splits its layers;
# --batch_sizes: global, with --weak for each GPU. A study brings its own for both; --out: folder, runs/<name>-<time> if
# not given; --sbatch: options for every job, such as "--partition=gpu --account=me"; --dry_run: print the lines instead.
# What follows the name of the script or the study is passed on to each training.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "sweep.sh: error: $1" >&2; exit 2; }

gpus="" batch_sizes="" scaling=strong out="" sbatch="" dry_run=""
while [[ ${1:-} == --* ]]; do
    case $1 in
    --weak) scaling=weak; shift; continue ;;
    --dry_run) dry_run=yes; shift; continue ;;
    --gpus | --batch_sizes | --out | --sbatch) [ $# -ge 2 ] || fail "$1 needs a value" ;;
    *) fail "unknown option $1" ;;
    esac
    declare "${1#--}=$2"
    shift 2
done
[ $# -ge 1 ] || fail "which script? For example: bash slurm/sweep.sh images --model cnn"
study=""
if [ "$1" = study ]; then
    study=${2:-}
    [[ $study =~ ^(agnews|imdb|gpt|mnist|six)$ ]] || fail "which study? agnews, imdb, gpt, mnist or six"
    shift
fi
name=$1
shift
[[ " $* " != *" --dry_run "* ]] || fail "options of sweep.sh stand before the name"
if [ -z "$study" ]; then
    [ -f "slurm/multigpu_$name.slurm" ] || fail "there is no slurm/multigpu_$name.slurm"
    grep -q '"--log"' "multigpu/$name.py" || fail "multigpu/$name.py has no --log, from which the report is made"
fi
out=${out:-runs/$name-$(date +%Y%m%d-%H%M%S)}
[ ! -e "$out" ] || [ -z "$(ls -A "$out")" ] || fail "$out is not empty: choose another --out"
read -ra options <<<"$sbatch"

for count in $gpus; do
    [[ $count =~ ^([1-9][0-9]*x)?[1-9][0-9]*(/[1-9])?$ ]] || fail "--gpus $count is not a number, NODESxGPUS or GPUS/STAGES"
    each=${count#*x}
    [[ $count != */* ]] || ((${each%/*} % ${count#*/} == 0)) || fail "--gpus $count: its stages do not divide the GPUs"
done
for size in $batch_sizes; do
    [[ $size =~ ^[1-9][0-9]*$ ]] || fail "--batch_sizes $size is not a number"
done

jobs=() runs=()
submit() { # NAME ARGUMENT...: hands the arguments to sbatch, and adds the job's id to jobs
    local what=$1 job=ID
    shift
    if [ -n "$dry_run" ]; then
        printf '%q ' sbatch --parsable --kill-on-invalid-dep=yes ${options[@]+"${options[@]}"} "$@"; echo
    elif ! job=$(sbatch --parsable --kill-on-invalid-dep=yes ${options[@]+"${options[@]}"} "$@" | cut -d';' -f1); then
        if [ ${#jobs[@]} = 0 ]; then rmdir "$out" || true; else scancel "${jobs[@]}"; fi
        fail "sbatch refused the $what, and the jobs before it are cancelled"
    fi
    jobs+=("$job")
}

sweep() { # LABEL GPUS BATCH_SIZES SCRIPT ARGUMENT...: submits the runs of a script, whose logs begin with the label
    local label=$1 counts=${gpus:-$2} sizes=${batch_sizes:-$3} script=$4 count size
    shift 4
    for count in $counts; do
        local nodes=1 each=${count#*x} stages=1 folder=multigpu tasks=() more=()
        [[ $count != */* ]] || stages=${count#*/}
        each=${each%/*}
        [[ $count != *x* ]] || nodes=${count%x*}
        case $count in 1) folder=singlegpu ;; */*) folder=hybrid more=(--num_stages "$stages") ;; *x*) folder=multinode ;; esac
        [ $folder != multigpu ] || more=(--num_gpus "$each") # without GPUs, too
        [[ $count != *[x/]* ]] || tasks=(--ntasks-per-node=$((each / stages)))
        if [ ! -f "slurm/${folder}_$script.slurm" ]; then
            echo "$label$count is left out: there is no slurm/${folder}_$script.slurm"
            continue
        fi
        if [ $folder = multigpu ] && [[ " $sbatch" != *@(--cpus-per-| -c)* ]]; then # each process has the cores of singlegpu's
            cores=$(sed -n 's/^#SBATCH --cpus-per-task=\([0-9]*\).*/\1/p' "slurm/singlegpu_$script.slurm" 2>/dev/null || true)
            [ -z "$cores" ] || tasks=(--cpus-per-task=$((each * cores)))
        fi
        for size in $sizes; do
            local batch=$size run
            [ "$scaling" = strong ] || batch=$((size * nodes * each))
            run=$out/$label${folder}_${count/\//of}_$batch
            submit "run of $count" --nodes="$nodes" --gpus-per-node="$each" ${tasks[@]+"${tasks[@]}"} ${after:+"$after"} \
                --output="$run-%j.out" "slurm/${folder}_$script.slurm" "$@" ${more[@]+"${more[@]}"} --batch_size "$batch" \
                --log "$run.jsonl" --snapshot "$run.pt"
            runs+=("$run")
        done
    done
}

for variable in ${!SLURM_@}; do # those of a salloc: the jobs' sruns would take them for their options
    [ "$variable" = SLURM_CONF ] || unset "$variable"
done
[ -n "$dry_run" ] || mkdir -p "$out"
after="" # an option of sbatch: what a run waits for
mnist="images --dataset mnist"
case $study in
"") sweep "" "1 2 4" 64 "$name" "$@" ;;
agnews)
    for size in small large; do
        sweep ${size}_ "1 2 4" 64 text --dataset ag_news --model transformer --size $size --seq_len 128 "$@"
    done
    ;;
imdb) sweep "" "1 2 4" 64 text --dataset imdb --model transformer --dropout 0.2 --learning_rate 5e-4 --epochs 20 "$@" ;;
gpt)
    sweep "" "1 2 4" "64 128" gpt "$@"
    submit "comparison in fewer bits" --dependency="afterok:${jobs[0]}" --output="$out/quantize-%j.out" \
        slurm/quantize_gpt.slurm --snapshot "${runs[0]}.pt" --eager --num_samples 512
    ;;
mnist)
    sweep mnist_ "1 4 2x4" 256 $mnist --epochs 10 "$@"
    if [ ! -e data/bigmnist ]; then
        submit "making of bigMNIST" --output="$out/make-%j.out" slurm/singlegpu_make_bigmnist.slurm
        after=--dependency=afterok:${jobs[-1]}
    fi
    sweep bigmnist_ "1 4 2x4" 256 images --dataset data/bigmnist --epochs 1 "$@"
    ;;
six)
    sweep vgg11_ "1 2 4/2" 32 $mnist --model vgg11 --learning_rate 1e-4 "$@"
    sweep cnn_ "1 2 4/2" 256 $mnist "$@"
    sweep mlp_ "1 2 4/2" 1024 $mnist --model mlp "$@"
    sweep autoencoder_ "1 2 4/2" 64 $mnist --model autoencoder "$@"
    sweep nbow_ "1 2" 64 text --dataset imdb --dropout 0.5 "$@"
    sweep seq2seq_ "1 2" 128 translation --dataset multi30k --model lstm "$@"
    ;;
esac
[ ${#jobs[@]} -gt 0 ] || fail "no run is left"
submit report --dependency="afterany:$(IFS=:; echo "${jobs[*]}")" --output="$out/report.out" slurm/report.slurm "$out" --out "$out"
echo "$((${#jobs[@]} - 1)) jobs ($scaling scaling); job ${jobs[-1]} writes $out/report.md when they have ended"
