#!/bin/bash
# Submit a scaling study, each run with a log of its own, and a report when all have ended.
#     bash slurm/sweep.sh --gpus "1 2 4 2x4" --batch_sizes "64 128" images --model cnn --epochs 3
#     bash slurm/sweep.sh --weak --gpus "1 2 4" --batch_sizes 64 --dry_run images
#     bash slurm/sweep.sh study agnews    # a study of results.md: agnews, imdb, gpt, mnist or six
# --gpus "1 4": GPUs of a node. "2x4": two nodes of four GPUs. "4/2": four GPUs, in hybrid/images.py with two stages.
# --batch_sizes "64 128": global. With --weak, they are for each GPU. A study brings its own for these two options.
# --out FOLDER: where the logs go. If it is not given, runs/NAME-TIME.
# --sbatch "--partition=gpu --account=me": options for every job.
# --node_types "v100 a40": kinds of GPUs, as the site names them. Each run is submitted once for each kind.
# --dry_run: prints the lines in place of submitting them.
# What follows the name of the script or the study is passed on to each training. It may replace what a study says:
#     bash slurm/sweep.sh --gpus "1 2" study six --epochs 1
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "sweep.sh: error: $1" >&2; exit 2; }

gpus="" batch_sizes="" node_types="" scaling=strong out="" sbatch="" dry_run=""
while [[ ${1:-} == --* ]]; do
    case $1 in
    --weak) scaling=weak; shift; continue ;;
    --dry_run) dry_run=yes; shift; continue ;;
    --gpus | --batch_sizes | --node_types | --out | --sbatch) [ $# -ge 2 ] || fail "$1 needs a value" ;;
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
read -ra kinds <<<"$node_types"
[ ${#kinds[@]} -gt 0 ] || kinds=("")

for count in $gpus; do
    [[ $count =~ ^([1-9][0-9]*x)?[1-9][0-9]*(/[1-9])?$ ]] || fail "--gpus $count is not a number, NODESxGPUS or GPUS/STAGES"
    each=${count#*x}
    [[ $count != */* ]] || ((${each%/*} % ${count#*/} == 0)) || fail "--gpus $count: its stages do not divide the GPUs"
done
for size in $batch_sizes; do
    [[ $size =~ ^[1-9][0-9]*$ ]] || fail "--batch_sizes $size is not a number"
done
for kind in $node_types; do
    [[ $kind =~ ^[A-Za-z0-9][A-Za-z0-9_.-]*$ ]] || fail "--node_types $kind is not the name of a kind of GPU"
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
            local batch=$size kind run
            [ "$scaling" = strong ] || batch=$((size * nodes * each))
            for kind in "${kinds[@]}"; do
                run=$out/$label${folder}_${count/\//of}_$batch${kind:+_$kind}
                submit "run of $count" --nodes="$nodes" --gpus-per-node="${kind:+$kind:}$each" \
                    ${tasks[@]+"${tasks[@]}"} ${after:+"$after"} \
                    --output="$run-%j.out" "slurm/${folder}_$script.slurm" "$@" ${more[@]+"${more[@]}"} \
                    --batch_size "$batch" --log "$run.jsonl" --snapshot "$run.pt"
                runs+=("$run")
            done
        done
    done
}

for variable in ${!SLURM_@}; do # those of a salloc: the jobs' sruns would take them for their options
    [ "$variable" = SLURM_CONF ] || unset "$variable"
done
[ -n "$dry_run" ] || mkdir -p "$out"
after="" # an option of sbatch: what a run waits for
# Each study with the settings that its authors give. What they do not say is ours, and a comment names it.
case $study in
"") sweep "" "1 2 4" 64 "$name" "$@" ;;
agnews) # Theirs: two models, 1 and 4 GPUs, a batch of 128 (32 a GPU), 20 epochs, the rate, 4 workers, texts of 128 to 256.
    # Ours: both ends of these lengths for both models, and that all runs have the settings of the large one on 4 GPUs.
    for size in small large; do
        for length in 128 256; do
            sweep "${size}_${length}_" "1 4" 128 text --dataset ag_news --model transformer --size $size --seq_len $length \
                --epochs 20 --learning_rate 1e-3 --num_workers 4 "$@"
        done
    done
    ;;
imdb) # Theirs: a transformer, 1 and 4 GPUs, 20 epochs. Ours: its size, the batch, dropout and the rate.
    sweep "" "1 4" 64 text --dataset imdb --model transformer --epochs 20 --dropout 0.2 --learning_rate 5e-4 "$@"
    ;;
gpt) # Theirs: 1, 2 and 4 GPUs, both batches, one epoch, the rate, dynamic int8. Ours: the text, and the size of the model.
    sweep "" "1 2 4" "64 128" gpt --epochs 1 --learning_rate 1e-4 "$@"
    submit "comparison in fewer bits" --dependency="afterok:${jobs[0]}" --output="$out/quantize-%j.out" \
        slurm/quantize_gpt.slurm --snapshot "${runs[0]}.pt" --eager --num_samples 512
    ;;
mnist) # Theirs: MNIST and bigMNIST on one GPU, a node of four, and several nodes, of kinds that --node_types names.
    # Ours: two nodes, the model (a cnn), the batch, the rate, and the epochs.
    sweep mnist_ "1 4 2x4" 256 images --dataset mnist --model cnn --epochs 10 "$@"
    if [ ! -e data/bigmnist ]; then
        submit "making of bigMNIST" --output="$out/make-%j.out" slurm/singlegpu_make_bigmnist.slurm
        after=--dependency=afterok:${jobs[-1]}
    fi
    sweep bigmnist_ "1 4 2x4" 256 images --dataset data/bigmnist --model cnn --epochs 1 "$@"
    ;;
six) # Theirs: six models on 1 and 2 GPUs, the epochs, and the MLP with its layers on two GPUs (MP-DDP).
    # Ours: the data sets (guessed from their accuracies), the batches, the rates, dropout, the epochs of the autoencoder, and
    # that MP-DDP on two GPUs is one process with two stages. Their VGG11 seems to start from ImageNet's weights: --pretrained.
    sweep vgg11_ "1 2" 32 images --dataset cifar10 --model vgg11 --epochs 3 --learning_rate 1e-4 "$@"
    sweep nbow_ "1 2" 64 text --dataset imdb --model nbow --epochs 5 --dropout 0.5 "$@"
    sweep seq2seq_ "1 2" 128 translation --dataset multi30k --model lstm --epochs 10 "$@"
    sweep autoencoder_ "1 2" 64 images --dataset mnist --model autoencoder --epochs 10 "$@"
    sweep cnn_ "1 2" 256 images --dataset cifar10 --model cnn --epochs 20 "$@"
    sweep mlp_ "1 2 2/2" 1024 images --dataset mnist --model mlp --epochs 10 "$@"
    ;;
esac
[ ${#jobs[@]} -gt 0 ] || fail "no run is left"
submit report --dependency="afterany:$(IFS=:; echo "${jobs[*]}")" --output="$out/report.out" slurm/report.slurm "$out" --out "$out"
echo "$((${#jobs[@]} - 1)) jobs ($scaling scaling); job ${jobs[-1]} writes $out/report.md when they have ended"
