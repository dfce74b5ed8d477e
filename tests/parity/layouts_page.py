"""docs/layouts.md: which choices go together, from the legality check itself.

python tests/parity/layouts_page.py > docs/layouts.md
"""

from itertools import combinations
from typing import Any

from shardwise.spec import load_run
from shardwise.spec.legality import illegal

_PIPELINE = {"pp": 2, "virtual_stages": 2}
CHOICES: dict[str, dict[str, Any]] = {
    "DDP": {"dp_replicate": 2},
    "ZeRO-1": {"dp_shard": 2, "zero": 1},
    "FSDP, zero 2": {"dp_shard": 2, "zero": 2},
    "FSDP, zero 3": {"dp_shard": 2, "zero": 3},
    "HSDP": {"dp_replicate": 2, "dp_shard": 2},
    "TP": {"tp": 2},
    "CP, all-gather": {"cp": 2, "cp_method": "allgather"},
    "CP, ring": {"cp": 2, "cp_method": "ring"},
    "CP, Ulysses": {"cp": 2, "cp_method": "ulysses"},
    "EP": {"ep": 2},
    "PP, gpipe": {"pp": 2, "schedule": "gpipe"},
    "PP, 1f1b": {"pp": 2, "schedule": "1f1b"},
    "PP, interleaved": {**_PIPELINE, "schedule": "interleaved"},
    "PP, interleaved-zb": {**_PIPELINE, "schedule": "interleaved-zb"},
    "PP, zbv": {**_PIPELINE, "schedule": "zbv"},
    "PP, dualpipev": {**_PIPELINE, "schedule": "dualpipev"},
    "recompute selective": {"recompute": "selective"},
    "recompute full, every:K, sqrt": {"recompute": "full"},
    "offload optimizer": {"offload": "optimizer"},
    "offload parameters": {"offload": "parameters"},
    "offload activations": {"offload": "activations"},
    "chunked loss": {"loss": "chunked"},
    "compile": {"compile": True},
    "async_tp": {"async_tp": True},
}
_ALIKE = [("DDP", "ZeRO-1", "FSDP, zero 2", "FSDP, zero 3", "HSDP")]
_ALIKE += [tuple(name for name in CHOICES if name.startswith(kind)) for kind in ("CP", "PP", "recompute", "offload")]


def reasons(layout: dict[str, Any], *, tied: bool = False) -> list[str]:
    """Why a model with experts, large enough for everything, cannot be trained on a layout."""
    run = load_run(
        {
            "model": {"preset": "tiny-moe", "layers": 8, "heads": 8, "kv_heads": 8, "tied": tied},
            "cluster": {"gpu": "h100-sxm"},
            "layout": layout,
            "recipe": {"sequence": 64, "batch_tokens": 64 * 64, "steps": 1},
        }
    )
    return list(illegal(run.model, run.layout, run.recipe))


def together(left: str, right: str) -> dict[str, Any]:
    """Both choices, and what either needs: ranks to spread experts over, shards for zero, compiled products for
    async_tp, FSDP2 for offloaded parameters."""
    layout = {**CHOICES[left], **CHOICES[right]}
    names = (left, right)
    if "async_tp" in names:
        layout |= {"compile": True, "tp": 2}
    if "offload parameters" in names and not {"DDP", "ZeRO-1"} & set(names):
        layout = {"dp_shard": 2, **layout}
    if "EP" in names and not {"tp", "cp", "dp_shard"} & layout.keys() and "DDP" not in names:
        layout |= {"dp_shard": 2}
    if layout.get("schedule") in ("interleaved-zb", "zbv", "dualpipev") and "FSDP, zero 3" not in names:
        layout = {**layout, "zero": 2 if layout.get("dp_shard", 1) > 1 and layout.get("zero") != 1 else
                  layout.get("zero", 0)}  # fmt: skip
    return layout


def page() -> str:
    names = list(CHOICES)
    excluded = {frozenset(pair) for group in _ALIKE for pair in combinations(group, 2)}
    notes: dict[str, int] = {}
    rows = []
    for row in names:
        cells = []
        for column in names:
            if column == row:
                cells.append("·")
            elif frozenset((row, column)) in excluded:
                cells.append("")
            else:
                found = reasons(together(row, column))
                cells.append("✓" if not found else str(notes.setdefault(found[0], len(notes) + 1)))
        rows.append(f"| {row} | " + " | ".join(cells) + " |")
    header = "| | " + " | ".join(f"{index}" for index in range(1, len(names) + 1)) + " |"
    lines = [
        "# Which layouts work",
        "",
        "Two choices at a time, on a model with experts (no routed experts: no EP; all else is the same). ✓: allowed. "
        "The parity matrix (`tests/parity`) trains every single choice and the products that its names list; "
        "`python tests/parity/pairs.py` trains every ✓ of this table but the compiler's. A number: refused by the "
        "legality check, which `plan`, `train` and `check` share, with the reason below. Empty: two values of one "
        "field. Columns are numbered as rows are. EP stands beside ranks that its experts can be spread over.",
        "",
        header,
        "|" + "---|" * (len(names) + 1),
        *(f"| {index}. {row[2:]}" for index, row in enumerate(rows, start=1)),
        "",
        "Refused:",
        "",
        *(f"{number}. {reason}" for reason, number in notes.items()),
        "",
        "A model with tied embeddings, besides: "
        + reasons({"pp": 2, "schedule": "zbv", "virtual_stages": 2}, tied=True)[0]
        + ".",
        "",
        "Degrees must divide what they cut: heads, KV heads (or be a multiple of them), inner sizes and vocabulary by "
        "`tp`; the sequence by 2 · `cp` · `tp`; with Ulysses the KV heads of a rank by `cp`; experts by `ep`; the "
        "batch by data ranks and micro-batch. Layers must make `pp` · `virtual_stages` stages, a step as many "
        "micro-batches as its schedule takes. Each refusal names the nearest legal value.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
