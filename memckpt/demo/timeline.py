"""The recovery as a table for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from memckpt.demo.verdict import PHASES, Recovery, Verdict


def rows(recovery: Recovery) -> list[tuple[float, str, str]]:
    """(seconds since the signal, who, what) in order of time. Local."""
    found: list[tuple[float, str, str]] = []
    back = recovery.back()
    for life in recovery.lives:
        who, first = f"rank {life.rank}", life.entered
        if life in back:
            was = next((b.pid for b in recovery.before if b.rank == life.rank), 0)
            how = "goes on" if life.pid == was else f"is now process {life.pid}, instead of {was}"
            found.append((first.at, who, f"{how}, in generation {first.generation}"))
            if life.restored:
                r = life.restored
                if r.source == "storage":
                    # The report has durations only; loading is the last of them.
                    read = f"has read its snapshot from storage, in {r.seconds.get('fetch', 0.0) * 1e3:.1f} ms"
                    found.append((r.at - r.seconds.get("load", 0.0), who, read))
                found.append(
                    (r.at, who, f"has step {r.step} back, {r.nbytes / 1e6:.1f} MB in all, its own part from {r.source}")
                )
            found += [(s.at, who, f"step {s.step}") for s in life.steps[:1]]
        else:
            found += [(s.at, who, f"finished step {s.step}") for s in life.steps[-1:]]
        if life.left:
            found.append((life.left.at, who, f"leaves training: {life.left.error}"))
        if life.finished:
            found.append((life.finished.at, who, f"through with step {life.finished.step}"))
    return sorted((at - recovery.at, who, what) for at, who, what in found)


def show(console: Console, verdict: Verdict, recovery: Recovery) -> None:
    """Print the timeline and the verdict. Local."""
    table = Table(title=f"run {verdict.run}, seed {verdict.seed}", title_justify="left")
    table.add_column("seconds", justify="right")
    table.add_column("who")
    table.add_column("what")
    signal = f"process {verdict.victim_pid}" if recovery.in_job else "the whole job"
    told = [(0.0, "observer", f"sends {verdict.signal} to {signal}, in step {verdict.killed_at_step}")]
    if recovery.persisted_step is not None:
        lost = f"all memory is gone; step {recovery.persisted_step} is the newest in storage; starts the job again"
        told.append((recovery.restarted_at - recovery.at, "observer", lost))
    for at, who, what in sorted(told + rows(recovery)):
        style = "bold red" if who == "observer" else None
        table.add_row(f"{at:+.3f}", who, what, style=style)
    console.print(table)
    phases = Table(title="time until the state was back", title_justify="left")
    for name in (*PHASES, "total", "first_step"):
        phases.add_column(name, justify="right")
    phases.add_row(*(f"{verdict.seconds[name] * 1e3:.1f} ms" for name in (*PHASES, "total", "first_step")))
    console.print(phases)
    console.print(
        f"lost steps: {verdict.lost_steps} (killed in step {verdict.killed_at_step}, "
        f"back at step {verdict.recovered_step}, from {verdict.source})"
    )
    c, equal = verdict.compared, "equal byte for byte" if verdict.bitwise_equal else "NOT equal"
    console.print(
        f"compared with the uninterrupted run: {c['losses']} losses, {c['digests']} digests of the parameters, "
        f"{c['final_nbytes'] / 1e6:.1f} MB of final state: {equal}"
    )
    for problem in verdict.problems:
        console.print(f"[bold red]not proved:[/] {problem}")
    if verdict.proved:
        console.print("[bold green]proved[/]")
