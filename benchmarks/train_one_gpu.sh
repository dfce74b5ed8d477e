#!/usr/bin/env bash
# GPT-2 124M and Llama 3.2 1B on one H200, in bf16, on the built-in data: throughput, memory, falling loss; and a resumed
# run that must equal one that was not interrupted, in deterministic mode.
#   benchmarks/train_one_gpu.sh OUT [resume]     with `resume`, only the last part
set -euo pipefail
out=${1:?where results go}
train="python3 -m shardwise train examples/tiny.yaml --nproc 1 --cluster.gpu h200-sxm --recipe.precision bf16
  --recipe.evaluation.tokens 500K --recipe.checkpoint.every 0"

summary() { # the median of the last ten steps
  python3 - "$1" <<'PY'
import json, statistics, sys
lines = [json.loads(line) for line in open(f"{sys.argv[1]}/metrics.jsonl")]
last = lines[-10:]
middle = lambda key: statistics.median(line[key] for line in last)
print(f"{sys.argv[1]}: {middle('tokens_per_second'):,.0f} tokens/s  step {middle('step_seconds'):.3f} s  "
      f"mfu {middle('mfu'):.1%} (attention full {middle('mfu_full_attention'):.1%})  {middle('peak_memory_gib'):.1f} GiB  "
      f"input wait {middle('data_wait_fraction'):.1%}  loss {lines[0]['loss']:.3f} -> {lines[-1]['loss']:.3f}")
PY
}

if [ "${2:-}" != resume ]; then
gpt2="--recipe.sequence 1024 --recipe.batch_tokens 524288 --recipe.steps 15 --layout.micro_batch 32"
$train --model gpt2-124m $gpt2 --out "$out/gpt2"
$train --model '{preset: gpt2-124m, vocabulary: 50304}' $gpt2 --out "$out/gpt2-padded"
$train --model '{preset: gpt2-124m, vocabulary: 50304}' $gpt2 --layout.zero 3 --out "$out/gpt2-padded-fsdp"
$train --model llama3.2-1b --recipe.sequence 8192 --recipe.batch_tokens 131072 --recipe.steps 15 --layout.micro_batch 2 \
  --out "$out/llama"
for run in gpt2 gpt2-padded gpt2-padded-fsdp llama; do summary "$out/$run"; done
fi

again="$train --model gpt2-124m --recipe.sequence 1024 --recipe.batch_tokens 65536 --recipe.steps 30 --layout.micro_batch 16
  --recipe.deterministic true"
$again --out "$out/straight"
$again --out "$out/stopped" &
until [ "$(wc -l < "$out/stopped/metrics.jsonl" 2> /dev/null || echo 0)" -ge 10 ]; do sleep 0.05; done
kill -TERM $!
wait $! && exit 1 || [ $? -eq 4 ]
$again --out "$out/stopped"
same=$(cmp <(cut -d, -f 1-5 "$out/straight/metrics.jsonl") <(cut -d, -f 1-5 "$out/stopped/metrics.jsonl") && echo identical)
echo "resume in deterministic mode: ${same:-DIFFERENT}"
