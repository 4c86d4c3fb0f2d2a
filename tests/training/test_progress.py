"""What a run tells: plain lines, a bar on a terminal, nothing on other ranks."""

import io
import re

import pytest
from rich.console import Console

from bert_tasks.training import progress
from bert_tasks.training.progress import Clock, Reporter
from bert_tasks.training.step import StepLog


def log(step):
    return StepLog(step=step, loss=0.51237, grad_norm=1.0, learning_rate=4.2e-5)


def plain(*, total, every, seconds_per_step=2.0):
    """A reporter of lines, after all steps, and its stream."""
    stream, now = io.StringIO(), [100.0]
    console = Console(file=stream, force_terminal=False, get_time=lambda: now[0])
    reporter = Reporter(total_steps=total, logging_steps=every, console=console)
    for step in range(total):
        now[0] += seconds_per_step
        reporter.step(log(step), epoch=step // 5, tokens_per_second=12345.6)
    return reporter, stream


def test_plain_lines_come_at_the_first_step_every_few_and_the_last():
    _, stream = plain(total=12, every=5)
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/12", "5/12", "10/12", "12/12"]
    assert lines[0].endswith("left -:--:--")
    assert lines[1] == "step 5/12  epoch 1  loss 0.5124  lr 4.20e-05  12,346 tokens/s  elapsed 0:00:10  left 0:00:14"
    assert lines[-1].endswith("left 0:00:00")


def test_plain_output_has_no_control_characters():
    reporter, stream = plain(total=3, every=1)
    reporter.evaluation(3, {"loss": 0.25, "HasAns_f1": 0.4}, best=True)
    reporter.note("done")
    reporter.close()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", stream.getvalue())
    assert stream.getvalue().endswith(
        "\nevaluation after step 3: loss 0.2500  HasAns_f1 0.4000  (best so far)\nnote: done\n"
    )


@pytest.mark.parametrize(("per_step", "text"), [(0.1, "0:00:05"), (36.0, "0:30:00"), (1000, "13:53:20")])
def test_the_time_left_is_readable(per_step, text):
    _, stream = plain(total=100, every=50, seconds_per_step=per_step)
    assert stream.getvalue().splitlines()[1].endswith(f"left {text}")


@pytest.mark.parametrize(("width", "figures"), [(120, "loss 0.5124  lr 4.20e-05  4,321 tokens/s"), (80, "loss 0.5124")])
def test_the_bar_shows_figures_and_names_the_times(width, figures):
    stream, now = io.StringIO(), [0.0]
    console = Console(file=stream, force_terminal=True, width=width, height=20, get_time=lambda: now[0])
    reporter = Reporter(total_steps=9000, logging_steps=1, console=console)
    reporter.note("weights: [all] loaded")
    for step in (0, 2999):
        now[0] += 50
        reporter.step(log(step), epoch=1, tokens_per_second=4321.0)
    reporter.evaluation(4, {"accuracy": 0.75}, best=False)
    reporter.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "epoch 2" in shown
    assert f"3000/9000 {figures} elapsed 0:01:40 left 0:01:41" in shown
    assert "weights: [all] loaded" in shown
    assert "evaluation after step 4: accuracy 0.7500" in shown


@pytest.mark.parametrize("has_widgets", [True, False])
def test_a_notebook_has_a_bar_if_it_can_be_updated(has_widgets, monkeypatch):
    monkeypatch.setattr(progress, "find_spec", lambda name: object() if name == "ipywidgets" and has_widgets else None)
    started, noted = [], []
    monkeypatch.setattr(progress.Progress, "start", lambda bar: started.append(bar))
    console = Console(file=io.StringIO(), force_jupyter=True)
    monkeypatch.setattr(console, "out", lambda text, **_: noted.append(text))
    reporter = Reporter(total_steps=2, logging_steps=1, console=console)
    reporter.step(log(0), epoch=0, tokens_per_second=1.0)
    assert (len(started), len(noted)) == ((1, 0) if has_widgets else (0, 1))


def test_other_processes_report_nothing(capsys):
    silent = Reporter(total_steps=1, logging_steps=1, visible=False)
    silent.note("x")
    silent.step(log(0), epoch=0, tokens_per_second=1.0)
    silent.evaluation(1, {"accuracy": 1.0}, best=True)
    silent.close()
    assert capsys.readouterr() == ("", "")


def test_a_clock_leaves_out_the_time_between_intervals() -> None:
    times = iter([10.0, 11.0, 12.0, 50.0, 54.0])
    clock = Clock(lambda: next(times))
    assert (clock.stop(), clock.mean_tokens_per_second) == (0, 0)
    clock.start()
    clock.tokens += 30
    assert clock.tokens_per_second == 30
    assert clock.stop() == 2
    assert clock.stop() == 0  # it has ended
    clock.start()
    clock.tokens += 60
    assert clock.stop() == 4
    assert clock.mean_tokens_per_second == 15
