"""docs/questions.md: every command runs, with the exit code that stands behind it, and says what the page points at."""

import re
import shlex
from pathlib import Path

import pytest

from shardwise.cli.main import main

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "questions.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = {
    title: [
        (line, int(code or 0))
        for line, code in re.findall(r"^\$ shardwise (.*?)(?:  # exit (\d))?$", text, re.MULTILINE)
    ]
    for title, text in SECTIONS.items()
}
READ = {  # what the page tells the reader to look at, in all the section's answers together
    1: ["activations", "Memory of rank 7", "headroom"],
    2: ["verdict: oom", "memory live GiB", "optimizer"],
    3: ["recompute none → full", "HFU"],
    4: ["memory live GiB"],
    5: ["optimizer"],
    6: ["allocator slack", "CUDA context", "used "],
    7: ["memory live GiB", "logits"],
    8: ["memory live GiB"],
    9: ["tp 8 before the model needs it", "the step goes to", "of the busiest rank's step: tensor"],
    10: ["exposed data s", "tokens/s/GPU", "dp_replicate 8 × dp_shard 8 (HSDP)"],
    11: ["MFU", "HFU"],
    12: ["why", "bubble", "exposed data s"],
    13: ["memory live GiB", "step s"],
    14: ["layout.tp 4 does not divide model.ffn 14338; nearest: ", "does not fit: rank"],
    15: ["memory used GiB", "micro_batch 1 → 2"],
}


def test_all_fifteen_are_there():
    numbers = [int(title.split(".")[0]) for title in SECTIONS if title[0].isdigit()]
    assert numbers == list(range(1, 16))
    assert all(COMMANDS.values())
    assert PAGE.count("$ shardwise") == sum(map(len, COMMANDS.values()))


@pytest.mark.parametrize("title", SECTIONS)
def test_commands_answer(title, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    whole = ""
    for command, expected in COMMANDS[title]:
        code = main(shlex.split(command))
        out, err = capsys.readouterr()
        assert (code, err) == (expected, ""), command
        whole += out
    for text in READ.get(int(title.split(".")[0]) if title[0].isdigit() else 0, []):
        assert text in whole, text
