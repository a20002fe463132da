#!/bin/bash
# Submit a scaling study of one script, each run with a log of its own, and a report when all have ended.
#     bash slurm/sweep.sh --gpus "1 2 4 2x4" --batch_sizes "64 128" images --model cnn --epochs 3
#     bash slurm/sweep.sh --weak --gpus "1 2 4" --batch_sizes 64 --dry_run images
# --gpus: a number of GPUs of one node, or NODESxGPUS; --batch_sizes: global, with --weak for each GPU; --out: folder,
# runs/<script>-<time> if not given; --sbatch: options for every job, such as "--partition=gpu --account=me"; --dry_run:
# print the lines instead. What follows the script's name is passed on to it.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "sweep.sh: error: $1" >&2; exit 2; }

gpus="1 2 4" batch_sizes=64 scaling=strong out="" sbatch="" dry_run=""
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
script=$1
shift
out=${out:-runs/$script-$(date +%Y%m%d-%H%M%S)}
[ -f "slurm/multigpu_$script.slurm" ] || fail "there is no slurm/multigpu_$script.slurm"
grep -q '"--log"' "multigpu/$script.py" || fail "multigpu/$script.py has no --log, from which the report is made"
[ ! -e "$out" ] || [ -z "$(ls -A "$out")" ] || fail "$out is not empty: choose another --out"
read -ra options <<<"$sbatch"

for count in $gpus; do
    [[ $count =~ ^([1-9][0-9]*x)?[1-9][0-9]*$ ]] || fail "--gpus $count is neither a number nor NODESxGPUS"
done
for size in $batch_sizes; do
    [[ $size =~ ^[1-9][0-9]*$ ]] || fail "--batch_sizes $size is not a number"
done

exec 3>&1
submit() { # ARGUMENT... of sbatch: prints the job's id
    if [ -n "$dry_run" ]; then
        { printf '%q ' sbatch --parsable "$@"; echo; } >&3
        echo ID
    else
        sbatch --parsable "$@" | cut -d';' -f1
    fi
}

for name in ${!SLURM_@}; do # those of a salloc: the jobs' sruns would take them for their options
    [ "$name" = SLURM_CONF ] || unset "$name"
done
[ -n "$dry_run" ] || mkdir -p "$out"
jobs=()
for count in $gpus; do
    nodes=1 each=${count#*x} tasks=()
    [[ $count != *x* ]] || nodes=${count%x*}
    [[ $count != *x* ]] || tasks=(--ntasks-per-node="$each")
    case $count in 1) folder=singlegpu ;; *x*) folder=multinode ;; *) folder=multigpu ;; esac
    processes=()
    [ "$folder" != multigpu ] || processes=(--num_gpus "$each") # without GPUs, too
    for size in $batch_sizes; do
        batch=$size
        [ "$scaling" = strong ] || batch=$((size * nodes * each))
        run=$out/${folder}_${count}_$batch
        job=$(submit ${options[@]+"${options[@]}"} --nodes="$nodes" --gpus-per-node="$each" \
            ${tasks[@]+"${tasks[@]}"} --output="$run-%j.out" \
            "slurm/${folder}_$script.slurm" "$@" ${processes[@]+"${processes[@]}"} --batch_size "$batch" --log "$run.jsonl" --snapshot "$run.pt") || {
            [ ${#jobs[@]} = 0 ] || scancel "${jobs[@]}"
            fail "sbatch refused the run of $count, and the jobs before it are cancelled"
        }
        jobs+=("$job")
    done
done
report=$(submit ${options[@]+"${options[@]}"} --dependency="afterany:$(IFS=:; echo "${jobs[*]}")" \
    --output="$out/report.out" slurm/report.slurm "$out" --out "$out")
echo "${#jobs[@]} runs ($scaling scaling); job $report writes $out/report.md when they have ended"
