"""Whether a run on CPUs has more threads than there are cores for them, which can make it many times slower.

Owns the rule and what the machine tells of itself. A piece of that which is missing or unreadable is left out and never
an error. Must not know training.
"""

import os
from dataclasses import dataclass
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class CPUUse:
    """The threads of a run and the cores of its machine.

    Attributes:
        threads: of each process (``torch.get_num_threads``).
        processes: of the run on this machine, this one included.
        cores: that the run may use; a quota may be a fraction.
        load: how many threads of all programs want to run; None if it is not known, or if the run may use a part of
            the machine only, because the load then may be on the other cores.
    """

    threads: int
    processes: int
    cores: float
    load: float | None = None

    @property
    def free_cores(self) -> int:
        """The cores that other programs leave, at least 1. One thread of each process is part of the load."""
        others = 0.0 if self.load is None else max(0.0, self.load - self.processes)
        return max(1, round(int(self.cores) - others))


def thread_hint(use: CPUUse) -> str | None:
    """What to set where threads outnumber the cores; None where they do not."""
    total, free = use.threads * use.processes, use.free_cores
    if total <= use.cores and total <= free:
        return None
    what = f"{use.processes} x {use.threads} threads" if use.processes > 1 else f"{use.threads} threads"
    if use.threads == 1:
        if use.processes <= use.cores:
            return None  # other programs are busy, and this run cannot use fewer threads
        return f"{what} share {use.cores:g} cores, which slows training down: start at most {int(use.cores)} processes"
    busy = "" if total > use.cores else f", on which other programs are busy (load {use.load:.1f})"
    return (
        f"{what} share {use.cores:g} cores{busy}, which can slow training down many times: "
        f"set the environment variable OMP_NUM_THREADS={max(1, free // use.processes)}"
    )


def cpu_use(*, threads: int, processes: int, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> CPUUse:
    """What the machine tells now.

    Args:
        threads, processes: see ``CPUUse``.
        proc, cgroups: where the kernel shows its files.
    """
    present = os.cpu_count()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    quotas = _quotas(proc, cgroups)
    known = [float(number) for number in (present, allowed) if number is not None]
    cores = max(1.0, min([*known, *quotas], default=1.0))
    is_whole = present is not None and cores >= present
    return CPUUse(threads=threads, processes=processes, cores=cores, load=_load(proc) if is_whole else None)


def _quotas(proc: Path, cgroups: Path) -> list[float]:
    """The cores that cpu.max allows to this process's control group and to those around it (version 2 only)."""
    found = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        if line.startswith("0::/"):
            own = cgroups / line.removeprefix("0::/")
            folders = [own, *own.parents]
            for folder in folders[: folders.index(cgroups) + 1]:
                match _read(folder / "cpu.max").split():
                    case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period):
                        found.append(int(quota) / int(period))
    return found


def _load(proc: Path) -> float | None:
    """The lower of the last minute's average and the threads that can run now.

    The average alone still counts a program that has ended, such as the last training run; the present number alone may
    count one that runs for a moment only.
    """
    try:
        average, _, _, now, _ = _read(proc / "loadavg").split()
        return min(float(average), float(now.partition("/")[0]))
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
