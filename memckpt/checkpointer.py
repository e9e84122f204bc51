"""The facade: `Checkpointer`."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal

from memckpt import assembly, banner, ending
from memckpt.errors import Closed, PeerLost, UsageError
from memckpt.hooks import StepHooks
from memckpt.options import Options, Persist, checked_metrics, checked_names, checked_step, parse_persist
from memckpt.policy.save import SavePolicy, parse
from memckpt.preemption import Watch
from memckpt.recovery import recover
from memckpt.redundancy import Mirror
from memckpt.reports import RestoreReport, Stats
from memckpt.saving.capture import Capture
from memckpt.saving.decide import Decisions
from memckpt.saving.generation import Saving
from memckpt.saving.tally import Tally


class Checkpointer:
    """Keeps the state of a training run in this node's memory and in its buddies'. Collective over `comm`.

    Parameters
    ----------
    states : mapping of str to object
        What to save: modules, optimizers, anything with ``state_dict`` and ``load_state_dict``, tensors, plain dicts
        and lists. The random number generators of this rank are added under the name "rng".
    name : str
        The run. A restarted run of that name finds its own snapshots again.
    every : int, str or SavePolicy
        When to save to memory: a number of steps, a time ("30s"), "continuous", a policy of `memckpt.policy.save`, or
        "auto", which saves as often as it can within 1% of added step time (`memckpt.policy.save.Adaptive`).
    redundancy : "auto" or Mirror
        "auto" is one replica on another node, where there is another rank.
    persist : Persist, str or path, optional
        Where committed snapshots go besides memory, behind training; a directory or URL alone means `Persist` of it.
    comm : optional
        `memckpt.comm.Communicator` or mpi4py communicator. None: that of `memckpt.run`, MPI under mpirun, else one
        rank.
    fresh : {"auto", True, False}
        "auto": start at step 0 where no earlier memory is there, but raise where this is known to be a restart. True:
        start over although there is memory. False: raise if there is none.
    on_error : {"warn", "raise"}
        What a save that did not commit does at the next call. A lost peer always raises.
    on_busy : {"skip", "wait"}
        What to do when a save falls due while the last one is not known everywhere to have ended; skipped ones are
        counted in `stats()`. With ``every=1``, "skip" saves every second or third step, "wait" every one.
    deadline : float
        Seconds to wait for a peer that shows no sign of life.
    bandwidth : float, optional
        Bytes per second that this rank may send for replication.
    max_unprotected : int, optional
        Steps that may be taken after a restore before every replica is there again; then `step` waits.
    grace : float
        Seconds from a SIGTERM until the process ends at the latest. SIGTERM and SIGUSR1 on any rank lead to one agreed
        step that is saved on all ranks (`preempted`); the user's own handlers still run.
    dedup : bool
        Save each tensor that ranks have in common (the replicas of DDP, or of a shard under HSDP) once among them, in
        equal parts: less to copy and to hold, but a restore needs all ranks' shards. Found by checksums, and looked at
        again in turn: a difference between such ranks is told.
    allow_pickle : bool
        Save plain objects of types that the typed tree has no form for, with pickle; needed again to restore them.
    quiet : bool
        Do not print the first lines.

    Raises
    ------
    UsageError
        An option is not valid, or ranks were given different ones.
    StateError
        Something in `states` cannot be saved.
    RunInUse, ForeignMemory
        The run's memory on this node is not ours to use.

    Notes
    -----
    All methods belong to the training thread. `step`, `restore`, `steps` and `close` are collective: every rank calls
    them in the same order. Source of the protocol: ``docs/architecture.md``.
    """

    def __init__(
        self,
        states: Mapping[str, object],
        *,
        name: str,
        every: int | str | SavePolicy = "auto",
        redundancy: Mirror | Literal["auto"] = "auto",
        persist: Persist | str | os.PathLike[str] | None = None,
        comm: Any = None,
        fresh: bool | Literal["auto"] = "auto",
        on_error: Literal["warn", "raise"] = "warn",
        on_busy: Literal["skip", "wait"] = "skip",
        deadline: float = 600.0,
        bandwidth: float | None = None,
        max_unprotected: int | None = None,
        grace: float = 30.0,
        dedup: bool = False,
        allow_pickle: bool = False,
        quiet: bool = False,
    ) -> None:
        policy, persist = parse(every), parse_persist(persist)
        options = Options(policy, persist, fresh, on_error, on_busy, deadline, max_unprotected, bandwidth, grace, dedup)
        self._closed = True  # until everything below is there
        self._parts = parts = assembly.open_parts(
            states, name=name, options=options, redundancy=redundancy, comm=comm, allow_pickle=allow_pickle
        )
        session = parts.session
        self._options = options
        self._quiet = quiet
        self._capture = Capture(
            parts.state,
            run=parts.run,
            shard=session.rank,
            world=session.world,
            threads=session.threads,
            deadline_s=deadline,
        )
        self._watch = Watch(grace)
        self._decisions = Decisions(parts.decide_comm, run=parts.run, deadline_s=deadline)
        self._saving: Saving | None = None
        self._report: RestoreReport | None = None
        self._tally = Tally()
        self._last_step = 0
        self._stepped = False
        self._step_ended: float | None = None
        self._commits = 0
        self._fenced_s, self._was_fenced = 0.0, False
        self._pid, self._thread = os.getpid(), 0
        self._hooks = StepHooks(parts.state.optimizers, self.fence)
        self._watch.start()
        self._closed = False
        self._at_exit = ending.abandon_at_exit(self.abandon)
        if parts.context is not None:
            parts.context.register(self)

    # -- restore -------------------------------------------------------------------------------------------------------

    def restore(self, step: int | None = None, require: bool = False, leave: Collection[str] = ()) -> RestoreReport:
        """Bring the newest step that every rank can have back into the live state. Collective.

        Another number of ranks than saved it gets the chunks of global tensors (DTensors) cut anew; everything else
        then has to be the same on all ranks that saved it, but for the random number generators.

        Parameters
        ----------
        step : int, optional
            Exactly this one; steps newer than it become a history that was left.
        require : bool
            Raise where nothing is there, in place of starting at step 0.
        leave : collection of str
            Names of objects in `states` that stay as they are.

        Returns
        -------
        RestoreReport
            With `step` 0 and source "none" where nothing was there.

        Raises
        ------
        NothingToRestore
            `step` is not there (the message lists what is), or nothing is and it was required or this is a restart.
        LayoutMismatch
            The snapshot does not fit the live state, or cannot be given to this number of ranks; nothing was changed.
        StateDamaged
            The live state was overwritten in part and no good copy is left.
        BudgetError
            The snapshots would not fit into memory; nothing was changed.
        PeerLost, DeadlineExceeded
        """
        self._check_usable()
        step = None if step is None else checked_step(step, least=0)
        parts = self._parts
        with self._losing_peers():
            self._end_generation()
            assembly.check_budget(parts, self._shard_nbytes())
            return self._begin_generation(
                recover.recover(
                    parts.session,
                    parts.state,
                    wanted_step=step,
                    require=require or assembly.must_find(parts),
                    start_over=self._options.fresh is True and step is None and self._report is None,
                    leave=checked_names(leave, parts.state.objects),
                )
            )

    def _begin_generation(self, recovery: recover.Recovery) -> RestoreReport:
        """Divide the slots, start the engine, protect the base again."""
        parts = self._parts
        base = recovery.base
        seq = self._saving.seq if self._saving is not None else 0
        parts.lock.update(recovery.generation)
        self._saving = Saving(parts, self._capture, self._decisions, recovery, self._tally, self._watch, seq)
        self._last_step = base.step if base is not None else 0
        self._commits = self._tally.snapshot().commits
        self._stepped = False
        self._tally.set(step=self._last_step)
        self._report = RestoreReport(
            step=self._last_step,
            generation=recovery.generation.counter,
            sources=tuple(recovery.sources),
            nbytes=recovery.nbytes,
            seconds=dict(recovery.seconds),
            rejected=tuple(recovery.rejected),
            protected=base is not None and not recovery.rebuild and recovery.saved_by == parts.session.world,
            saved_by=recovery.saved_by,
        )
        banner.tell(parts, self._shard_nbytes(), recovery, self._report, quiet=self._quiet)
        return self._report

    def _end_generation(self) -> None:
        """Before a restore: end what is under way and let go of the slots."""
        if self._saving is not None:
            self._capture.settle()
            self._saving.wait_for_outcome()
            persist = self._options.persist
            self._saving.drain_storage(0.0 if persist is None else persist.deadline_s)
            self._saving.stop(self._options.deadline_s, park=True)

    def _begin_without_restore(self) -> None:
        parts = self._parts
        assembly.check_budget(parts, self._shard_nbytes())
        start_over = self._options.fresh is True
        self._begin_generation(
            recover.recover(
                parts.session, parts.state, require=False, start_over=start_over, refuse_existing=not start_over
            )
        )

    # -- saving --------------------------------------------------------------------------------------------------------

    def step(self, n: int, metrics: Mapping[str, float] | None = None, *, save: bool = False) -> None:
        """Say that `n` optimizer steps are completed; saves if one is due. Collective, at each step on each rank.

        The state may be changed again as soon as an optimizer's step begins (it waits for the copy by itself); before
        anything else changes parameters or optimizer state, call `fence`.

        Parameters
        ----------
        n : int
            The last one plus one.
        metrics : mapping of str to float, optional
            What a preserve policy may choose by, such as a loss; written with the checkpoint if this step is persisted.
            A value that is not finite is left out.
        save : bool
            Save this step in any case, to storage as well where there is one, and wait for what is under way before
            it; the same on every rank. For the last step, or one after which training may stop.

        Raises
        ------
        UsageError
            `n` is not the last step plus one, an argument is of the wrong kind, or memory of this run exists and
            `restore` was not called.
        StepMismatch
            Ranks are at different steps, or disagree on `save`.
        SaveFailed
            With ``on_error="raise"``, where an earlier save did not commit, or could not be written to storage.
        PeerLost, DeadlineExceeded
            A peer is gone; what was under way is in doubt, and memory stays as it is for a recovery.
        """
        started = time.monotonic()
        self._check_usable()
        n, metrics = checked_step(n), checked_metrics(metrics)
        with self._losing_peers():
            if self._saving is None:
                self._begin_without_restore()
            saving = self._saving
            assert saving is not None
            saving.engine.pump()
            self._capture.settle()
            saving.raise_failure()
            if n != self._last_step + 1:
                saving.refuse(n, self._last_step)
            fired = self._hooks.take()
            stepped, self._last_step, self._stepped = self._stepped, n, True
            saving.at(n, fired if stepped else (), metrics, wanted=bool(save))
            self._watch.look_again()
        ended = time.monotonic()
        blocked_s = ended - started
        self._tally.set(step=n, last_blocked_s=blocked_s)
        self._tally.add(blocked_s=blocked_s)
        if self._step_ended is not None:
            saving.observe(ended - self._step_ended, blocked_s + self._fenced_s, fenced=self._was_fenced)
        self._step_ended, self._fenced_s, self._was_fenced = ended, 0.0, False
        saving.report_failed()

    @property
    def preempted(self) -> bool:
        """Some rank was told to stop (SIGTERM, SIGUSR1), and the step of that moment is saved on all ranks: leave the
        loop now. The same on every rank after the same step. Local.
        """
        return self._saving is not None and self._saving.preempted

    def steps(self, total: int) -> Iterator[int]:
        """Restore, then yield the indices of the steps still to do, and call `step` after each, with ``save=True`` for
        the last; ends early when some rank was told to stop. Collective.

        Parameters
        ----------
        total : int
            Optimizer steps of the whole run.

        Yields
        ------
        int
            Index of the step to do now: 0 for the first of the run.
        """
        self._check_usable()
        total = checked_step(total, least=0)
        report = self.restore() if self._report is None else self._report
        for index in range(max(report.step, self._last_step), total):
            yield index
            self.step(index + 1, save=index + 1 == total)
            if self.preempted:
                return

    def fence(self) -> None:
        """Wait until the state may be changed: the copy behind training is done. Local."""
        started = time.monotonic()
        self._was_fenced |= self._capture.fence()
        if self._saving is not None:
            self._saving.engine.pump()
        blocked_s = time.monotonic() - started
        self._fenced_s += blocked_s
        self._tally.add(blocked_s=blocked_s, last_blocked_s=blocked_s)

    def wait(self, timeout_s: float | None = None, *, persisted: bool = False) -> bool:
        """Wait until the last save has ended on this rank. Local, but ends only when the other ranks reach their
        fences, too.

        Parameters
        ----------
        timeout_s : float, optional
            Default: the deadline.
        persisted : bool
            Wait also until no rank has anything left to write to storage. Collective then: every rank calls it after
            the same step.

        Returns
        -------
        bool
            False when time ran out and the save goes on.

        Raises
        ------
        SaveFailed, PeerLost, DeadlineExceeded
            As `step`.
        """
        self._check_usable()
        self._capture.settle()
        if self._saving is None:
            return True
        self._saving.engine.hurry()
        timeout_s = self._options.deadline_s if timeout_s is None else timeout_s
        done = self._saving.engine.wait(timeout_s)
        if persisted:
            with self._losing_peers():
                done = self._saving.wait_for_storage(self._last_step, timeout_s) and done
        self._saving.raise_failure()
        self._saving.report_failed()
        return done

    def stats(self) -> Stats:
        """Counters up to now. Local."""
        stats = self._tally.snapshot()
        if self._saving is not None:
            stats.memory_nbytes = self._saving.pool.nbytes()
            stats.populate_s = self._saving.pool.populate_s
        return stats

    # -- the end -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Checkpointer:
        self._check_usable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        # Everything stays for a recovery; what was accepted gets a short time to be committed if the peers are there.
        if not self._closed and self._saving is not None:
            if self._tally.snapshot().commits == self._commits:
                ending.note_crash(self._saving, kind)
            if not isinstance(error, PeerLost):
                ending.drain(self._saving, self._capture, self._watch, self._options.deadline_s)
        self.abandon()

    def close(self, keep: bool | None = None) -> None:
        """Finish the last save, agree with all ranks that the run is over, and give the memory back. Collective,
        idempotent.

        Warns where the last step is not in storage, or in the memory that is kept: nothing is saved here, since the
        state may have changed after that step (see `step`, `save`).

        Parameters
        ----------
        keep : bool, optional
            True: leave the memory, marked as finished; a later run of the same name can restore it. False: remove it.
            Default: remove it, unless some rank was told to stop (SIGTERM, SIGUSR1): then the run is not over, and
            its next start finds its memory.

        Raises
        ------
        SaveFailed, PeerLost, DeadlineExceeded
            The end was not agreed by all; memory stays as it is.
        """
        if self._closed:
            return
        saving = self._saving
        try:
            self._capture.settle()
            if saving is not None:
                saving.wait_for_outcome()
                saving.leave()
        except BaseException:
            self.abandon()
            raise
        stopping = saving is not None and saving.stopping
        stays = stopping if keep is None else keep
        stats = self.stats()
        self._shut(remove=saving is not None and not stays, finished=stays and not stopping, abort=False)
        if saving is None:
            return
        if stopping and stays:
            ending.tell_stopped(self._parts, stats, quiet=self._quiet)
        elif self._stepped:
            ending.warn_of_unsaved(self._parts, stats, kept=stays)
        saving.report_failed()

    def abandon(self) -> None:
        """Let go of everything without agreement: thread, hooks, lock. Memory stays as it is. Local, idempotent."""
        if not self._closed:
            self._shut(remove=False, finished=False, abort=True)

    def interrupt(self, error: PeerLost) -> None:
        """A peer is known to be lost, `error` says which: end every wait of this Checkpointer. Any thread; local."""
        if self._saving is not None:
            self._saving.engine.fail(error)
        self._parts.break_off()

    def _shut(self, *, remove: bool, finished: bool, abort: bool) -> None:
        self._closed = True
        if self._pid != os.getpid():
            return  # a forked child: thread, lock and communicators are its parent's
        atexit.unregister(self._at_exit)
        self._hooks.remove()
        self._watch.stop()
        if self._saving is not None:
            self._saving.stop(ending.DRAIN_AFTER_ERROR_S)
        if abort:
            self._parts.break_off()
        assembly.close_parts(self._parts, remove=remove, finished=finished)

    @contextlib.contextmanager
    def _losing_peers(self) -> Iterator[None]:
        """A lost peer seen by the training thread: nobody may go on waiting for this rank."""
        try:
            yield
        except PeerLost as error:
            self.interrupt(error)
            if self._parts.context is not None:
                self._parts.context.on_failure(error)
            raise

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.abandon()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _shard_nbytes(self) -> int:
        """Bytes of this rank's snapshot, with optimizer state that is still to come."""
        return self._capture.plan().file_nbytes + assembly.predicted_nbytes(self._parts.state)

    def _check_usable(self) -> None:
        if self._closed:
            raise Closed("this Checkpointer is closed", run=self._parts.run)
        if self._pid != os.getpid():
            raise UsageError(f"this Checkpointer is pid {self._pid}'s; a forked child cannot use it")
        self._thread = self._thread or threading.get_ident()
        if self._thread != threading.get_ident():
            raise UsageError("this Checkpointer is already used by another thread: all calls belong to one")
