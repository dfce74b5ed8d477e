"""What people see while a run trains."""

from shardwise.report.progress import ProgressLine, step_line
from shardwise.spec import Step

STEP = Step(
    step=3, tokens=3000, loss=2.5, grad_norm=0.5, lr=1e-3, loss_scale=None, step_seconds=0.1,
    tokens_per_second=10_000.0, mfu=0.412, mfu_full_attention=0.43, hfu=0.412, peak_memory_gib=1.5,
    busiest_expert=None,
    data_wait_fraction=0.25,
)  # fmt: skip


def test_step_line():
    line = step_line(STEP, 10)
    assert line == (
        "step 3/10  loss 2.5000  grad_norm 0.500  lr 1.00e-03  10K tokens/s  mfu 41.2%  1.50 GiB  input wait 25%"
    )


def test_plain_lines_when_not_a_terminal(capsys):
    with ProgressLine(10, shown=True) as progress:
        progress.step(STEP, first=True)
        progress.step(STEP)  # within two seconds of the first: not shown
        progress.say("[bold]plain[/bold]")
    assert capsys.readouterr().out.splitlines() == [step_line(STEP, 10), "[bold]plain[/bold]"]


def test_other_ranks_say_nothing(capsys):
    with ProgressLine(10, shown=False) as progress:
        progress.step(STEP, first=True)
        progress.say("hello")
    assert capsys.readouterr().out == ""
