"""One training run from shards to an exported drafter: everything around the loop."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from specdec_tap.errors import ConfigError, InputError
from specdec_tap.runlog import MAX_DRAFT_TOKENS, PREDICTIONS_NAME
from specdec_tap.shards.remote import is_url
from specdec_tap.target import Fingerprint, Target, fingerprint, load_target

from . import build as building
from . import checkpoint, data, distributed, follow, inputs, runlog, start
from .algorithms import ALGORITHMS
from .batch import Batch
from .card import model_card
from .config import TrainConfig
from .conversations import ConversationStore
from .distributed import Group, join, leave
from .drafter import Drafter
from .evaluate import Evaluation, evaluate
from .export import drafter_fingerprint, export_drafter, lend_tables, load_drafter, target_ids_of
from .loop import DivergedError, Hooks, LoopState, StopRequested, train
from .mirror import Mirror
from .objective import Eagle3Objective
from .optim import Optimizers, WeightAverage
from .predictions import write_predictions
from .trackers import open_trackers

_FEW_SUPERVISED = 0.02
"""Share of tokens below which something is probably wrong."""


@dataclass(slots=True)
class Result:
    """What a run ended with."""

    folder: Path
    drafter: Path
    evaluation: Evaluation | None
    state: LoopState
    tokens_per_s: float
    interrupted: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


def run(
    config: TrainConfig,
    shards: Path | str,
    *,
    out: Path | str | None = None,
    target_path: Path | None = None,
    target_name: str | None = None,
    resume: bool = False,
    format: str = "vllm",
    progress: Callable[[float, str], None] = lambda done, note: None,
    say: Callable[[str], None] = lambda text: None,
    store: Any = None,
    tensorboard: bool = True,
    live: bool = False,
) -> Result:
    """Train on a folder of shards and export the best drafter.

    Args:
        config: Settings.
        shards: Folder of shards, or its URL.
        out: Run folder, or its URL; None makes ``runs/<time>``.
        target_path: Where the target's tensors are; None takes ``shards/target``.
        target_name: Written on the card.
        resume: Go on from the newest checkpoint in ``out``.
        format: Of the exported drafter.
        progress: Called with the share done and a note.
        say: Called with sentences for the user.
        store: Records instead of ``shards`` (tests).
        tensorboard: Write TensorBoard events.
        live: Train on what the server captures from now on, and on what is there already, once each.

    Raises:
        InputError, ConfigError: Something given is wrong; nothing was trained.
        DivergedError: Training stopped at a bad step; the last checkpoint stays.
    """
    keep_freed_memory()
    group = join()
    mirror = None
    try:
        if out is not None and is_url(out):
            mirror = open_mirror(str(out), resume, group)
            say(f"run folder: {out}, written to {mirror.folder} first")
            out = mirror.folder
        return _run(
            config,
            shards,
            None if out is None else Path(out),
            target_path,
            target_name,
            resume,
            format,
            progress,
            say,
            store,
            group,
            tensorboard,
            live,
            mirror,
        )
    finally:
        if mirror is not None and group.first:
            mirror.close()
        leave()


def open_mirror(url: str, resume: bool, group: Group) -> Mirror:
    """A run folder in a store, with a local copy for each machine."""
    mirror = Mirror(url)
    if group.local_rank == 0:
        mirror.fetch(resume=resume)
    group.barrier()
    if group.first:
        mirror.start()
    return mirror


def start_by_copying(config: TrainConfig, model: Drafter) -> bool:
    """Whether a new drafter gets weights that copy.

    Raises:
        ConfigError: That was asked for and cannot be.
    """
    possible = start.can_copy(model)
    if config.init == "copy" and not possible:
        raise ConfigError(
            f"init is 'copy', but the drafter is {model.title} with layer {config.layer!r}; only EAGLE-3 "
            "with layer 'llama' can start so. Set init to 'random'"
        )
    return possible and config.init != "random"


def copy_into(objective: Eagle3Objective, sample: data.Dataset, counts: torch.Tensor, seed: int) -> str:
    """Let a new drafter start by copying; returns what to tell about it.

    Args:
        objective: With the drafter.
        sample: Its training data.
        counts: How often each draft token was generated ``[V]``.
        seed: Of the random directions.
    """
    model = objective.model
    rows = start.rows_needed(model.config.hidden_size)
    held = start.start_from_copying(model, sample.own_tokens(rows), counts, seed=seed)
    if held is None:
        return "too few captured rows for a start that copies: the drafter starts with random weights"
    device = next(model.parameters()).device
    scale = start.scale_last_norm(
        objective, [batch.to(device) for batch in itertools.islice(sample.spread_out(), 16)]
    )
    return (
        f"the drafter starts by copying; its first state holds {held:.0%} of the row's own token, its last "
        f"norm is {scale:g} times the target's"
    )


def _run(
    config: TrainConfig, shards: Path, out: Path | None, target_path: Path | None, target_name: str | None,
    resume: bool, format: str, progress: Callable[[float, str], None], say: Callable[[str], None], store: Any,
    group: Group, tensorboard: bool, live: bool,
    mirror: Mirror | None,
) -> Result:  # fmt: skip
    device = pick_device(config.device, group)
    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to go on with")
    if group.first and out is not None:
        check_free(out, resume=resume)  # now, not after a wait for records
    kind = ALGORITHMS[config.algorithm]
    if live:
        follow.check_processes(group.size)
        if config.max_steps is None and config.time_limit is None:
            config = dataclasses.replace(config, schedule="constant")
        if store is None:
            say("waiting for the first record")
            store = follow.open_live(shards, config.follow_idle)
    single = store is not None  # followed or given records are used one by one
    store, target = open_inputs(shards, target_path, store)
    if skipped := getattr(store, "skipped", []):
        say(
            f"{len(skipped):,} entries of {str(shards)!r} are left out, such as: {skipped[0]}; 'specdec-tap "
            "shards verify' lists them"
        )
    checkpoints = readable_checkpoints(out) if resume and out else []
    if resume and not checkpoints:
        raise InputError(f"no checkpoint in {str(out)!r}; start without --resume")
    records = None
    if not live:
        # The order of training is one of the records there were.
        records = checkpoint.read(checkpoints[0])[1]["facts"].get("records") if checkpoints else None
        if records is None:
            records = inputs.held_records(store)
        else:
            total = len(store)
            store = inputs.as_it_was(store, records, shards)
            if later := total - len(store):
                say(
                    f"{later:,} records came after this run began and are left out; start a new one with "
                    "--init-from to train on them"
                )
    if not single:
        store = ConversationStore(store)
    store = inputs.view(store, kind)
    if config.prompt_weight is None:
        everywhere = getattr(store.header, "final_scope", "response") == "all"
        config = dataclasses.replace(config, prompt_weight=1.0 if everywhere else 0.0)
    captured = tuple(store.header.aux_layer_ids)
    building.check_layers(captured, target)
    aux_ids = building.chosen_layers(config, captured)
    source = (
        None
        if config.init_from is None
        else building.warm_start(config.init_from, target, aux_ids, config.algorithm)
    )
    if what := check_weights(store, target):
        say(
            f"warning: the {what} of {str(target.path)!r} are not those of the model that the shards were "
            "captured from, such as a quantized form of it (fingerprints differ); its head is used as it is"
        )
    if source is not None and (
        what := drafter_fingerprint(config.init_from).differs(captured_from(store, target))
    ):
        say(
            f"warning: {str(config.init_from)!r} was trained for a model with another {what} than the one "
            "that the shards were captured from (fingerprints differ)"
        )

    # What to train on.
    feed = None
    if live:
        known = checkpoint.read(checkpoints[0])[1]["state"]["known"] if checkpoints else {}
        feed = follow.Feed(store, config, target.vocab_size, cursors=known)
        say("waiting for enough generated tokens to start")
        feed.wait_for_start(0 if checkpoints else config.follow_start)
        survey = dataclasses.replace(feed.seen, stretches=feed.waiting())
        held = feed.held
    else:
        training, evaluation = data.split(store, config.held_out)
        survey = _survey(config, target, store, training, config.prompt_weight)
        held = _survey(config, target, store, evaluation, 0.0)  # a server drafts answers only
    say(f"training: {survey.explain()}")
    say(f"held out: {held.records:,} records, {held.supervised:,} supervised tokens")
    check_supervised(survey, say)

    # What to train.
    if source is not None and config.draft_vocab_size is None:
        draft_ids = target_ids_of(source)
    else:
        draft_ids = building.draft_vocabulary(config, target, survey.counts)
    if checkpoints:
        draft_ids = _draft_ids_of(checkpoints[0], target.vocab_size)
    size = target.vocab_size if draft_ids is None else len(draft_ids)
    if source is None:
        draft = building.draft_config(config, target, aux_ids, size)
    else:
        draft = dataclasses.replace(source.config, draft_vocab_size=size)
        say(f"starting from {str(config.init_from)!r}: its layers, norms and weights")
    objective = building.build(config, draft, target, draft_ids, device, source, survey.counts)
    facts = building.describe(draft, objective.model, building.draft_shape(target, config.layer))
    coverage = (
        1.0 if draft_ids is None else float(survey.counts[draft_ids].sum() / max(1, survey.counts.sum()))
    )
    facts["draft_vocab_coverage"] = coverage
    if source is None and not checkpoints and start_by_copying(config, objective.model):
        if group.first:
            sample = data.Dataset(store, survey, config.prompt_weight, columns_of(captured, aux_ids))
            counts = survey.counts if draft_ids is None else survey.counts[draft_ids]
            say(copy_into(objective, sample, torch.from_numpy(counts), config.seed))
        group.send_weights(objective.model)
    rows = objective.loss_rows
    facts["loss_vocab_size"] = size if rows is None else len(rows)
    facts["compute_dtype"] = str(objective.model.compute_dtype).removeprefix("torch.")
    say(
        f"drafter: {facts['architecture']}; {facts['trainable_parameters']:,} of {facts['parameters']:,} "
        f"parameters trained; draft vocabulary {size:,} of {target.vocab_size:,} (covers {coverage:.2%} of "
        f"training tokens), loss over {facts['loss_vocab_size']:,} of them; products in "
        f"{facts['compute_dtype']}"
    )
    if config.sharding == "fsdp2" and group.size > 1:
        distributed.shard(objective.model, device, group)
    optimizers = Optimizers(
        objective.model, name=config.optimizer, lr=config.lr, adamw_lr=config.adamw_lr,
        weight_decay=config.weight_decay, adamw_weight_decay=config.adamw_weight_decay,
        momentum=config.momentum, ns_steps=config.ns_steps,
    )  # fmt: skip
    average = WeightAverage(optimizers.parameters, config.ema) if config.ema else None
    generator = torch.Generator().manual_seed(config.seed * 1000 + group.rank)
    shared = {"draft": json.loads(json.dumps(dataclasses.asdict(draft))), "optimizer": config.optimizer,
              "seed": config.seed, "batch_tokens": config.batch_tokens}  # fmt: skip
    state = LoopState(processes=group.size)
    torch.manual_seed(config.seed + group.rank)

    folder = out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    if checkpoints:
        state = checkpoint.load(checkpoints[0], objective.model, optimizers, average, generator, shared)
        if checkpoint.regroup(state, group.size) or group.rank:
            # The file holds the first process's generator.
            generator.manual_seed((config.seed * 1000 + group.rank) * 1_000_003 + state.step)
        say(f"resumed from step {state.step:,} ({checkpoints[0].name})")
    shared["records"] = records  # compared above, and with words of its own
    log = None
    if group.first:
        prepare_folder(folder, resume=resume)
        (folder / "config.json").write_text(json.dumps(config.as_dict(), indent=2) + "\n")
        (folder / "provenance.json").write_text(json.dumps(runlog.provenance(), indent=2) + "\n")
        names = (["tensorboard"] if tensorboard and find_spec("tensorboard") else []) + config.tracker_names
        log = runlog.RunLog(folder, open_trackers(names, folder, config.as_dict()))
        log.write("start", settings=config.as_dict(), drafter=facts, shards=str(shards),
                  training=_counts(survey), held_out=_counts(held), resumed_step=state.step)  # fmt: skip

    session = _Session(
        config, objective, optimizers, average, generator, store, survey, held, folder, log, shared,
        group, target,
        target_name, format, facts, progress, feed, mirror, state.elapsed,
    )  # fmt: skip
    if feed is not None:
        session.used = dict(feed.cursors)
    started, tokens_before = time.perf_counter(), state.tokens
    interrupted = False
    try:
        state = train(config, objective, optimizers, average, generator, state, session.hooks(), group)
    except StopRequested:
        interrupted = True
        say(f"stopped; go on with: --resume --out {folder}")
    except DivergedError:
        if log is not None:
            log.write("note", text="stopped: loss or gradient not finite", step=state.step)
        raise
    finally:
        session.close()
        seconds = time.perf_counter() - started
    speed = (state.tokens - tokens_before) / max(1e-9, seconds)
    if damaged := session.damaged():
        say(
            f"{len(damaged):,} records could not be read and were left out, such as: {damaged[0]}; "
            "'specdec-tap shards verify' lists them"
        )
    drafter = folder / "drafter"
    # Ctrl-C is how a followed run ends: it leaves its newest state, evaluated or not.
    unsaved = not drafter.exists() or (feed is not None and (interrupted or session.best is None))
    if group.any(group.first and unsaved):
        session.export(state, None)
    if group.first:
        if not interrupted and (predicted := session.predict()):
            say(f"{PREDICTIONS_NAME}: how the drafter predicts {predicted:,} held-out records, by token")
        if log is not None:
            log.write("end", step=state.step, tokens=state.tokens, seconds=state.elapsed, tokens_per_s=speed,
                      best=state.best, best_step=state.best_step, interrupted=interrupted,
                      peak_rss_bytes=runlog.peak_rss_bytes())  # fmt: skip
            log.close()
        runlog.plot(folder)
    group.barrier()
    return Result(folder, drafter, session.best, state, speed, interrupted, facts)


@dataclass(slots=True)
class _Session:
    """The loop's view of the outside."""

    config: TrainConfig
    objective: Eagle3Objective
    optimizers: Optimizers
    average: WeightAverage | None
    generator: torch.Generator
    store: Any
    survey: data.Survey
    held: data.Survey
    folder: Path
    log: runlog.RunLog | None
    shared: dict[str, Any]
    group: Group
    target: Target
    target_name: str | None
    format: str
    facts: dict[str, Any]
    progress: Callable[[float, str], None]
    feed: follow.Feed | None = None
    mirror: Mirror | None = None
    elapsed: float = 0.0
    """Seconds of training before this session."""
    used: follow.Cursors = field(default_factory=dict)
    """With a feed: the last record of each stream that was trained."""
    best: Evaluation | None = None
    _prefetcher: data.Prefetcher | None = None
    _training: data.Dataset | None = None
    _held: data.Dataset | None = None

    def hooks(self) -> Hooks:
        return Hooks(
            self.epoch_batches, self.evaluate, self.write, self.save, self.saved_best, self._progress,
            newest_is_best=self.feed is not None,
        )  # fmt: skip

    def epoch_batches(
        self, epoch: int, first: int, stop: threading.Event
    ) -> tuple[int | None, Iterator[Batch]]:
        if self._training is None:
            self._training = data.Dataset(
                self.store, self.survey, self.config.prompt_weight, self._columns(),
                cache_bytes=self.config.teacher_cache,
            )  # fmt: skip
        if self.feed is not None:
            return None, self._followed(self.feed, stop)
        batches = data.epoch_batches(
            self.survey.stretches, batch_tokens=self.config.batch_tokens, seed=self.config.seed, epoch=epoch
        )
        mine = self.group.share(batches)
        self._stop_prefetching()
        self._prefetcher = data.Prefetcher(self._training.load, mine[first:], workers=self.config.workers)
        return len(mine), self._remembering(self._prefetcher)

    def _followed(self, feed: follow.Feed, stop: threading.Event) -> Iterator[Batch]:
        limit = self.config.time_limit
        waiting = feed.batches(stop, None if limit is None else max(0.0, limit - self.elapsed))

        def read(items: list[follow.Waiting]) -> tuple[Batch | None, list[follow.Waiting]]:
            try:
                return self._training.read([item.stretch for item in items]), items
            except InputError:  # counted there; old shards may have been removed since
                return None, items

        self._prefetcher = data.Prefetcher(read, waiting, workers=self.config.workers)
        for batch, items in self._prefetcher:
            for item in items:
                self.used[item.stream] = item.place
            if batch is not None:
                yield batch

    def _columns(self) -> list[int] | None:
        return columns_of(tuple(self.store.header.aux_layer_ids), self.objective.model.config.aux_layer_ids)

    def _remembering(self, batches: data.Prefetcher) -> Iterator[Batch]:
        for batch in batches:
            yield batch
            self._training.remember(batch)

    def evaluate(self) -> Evaluation | None:
        if self.feed is not None:
            # The window moves on, so nothing about its documents is worth remembering.
            self.held.stretches, self._held = self.feed.window(), None
        if not self.held.stretches:
            return None
        if self._held is None:
            self._held = data.Dataset(self.store, self.held, 0.0, self._columns())
        chosen = self.held.stretches[: self.config.eval_records]
        batches = data.epoch_batches(
            chosen, batch_tokens=self.config.batch_tokens, seed=0, epoch=0, shuffle=False
        )
        steps = max(self.config.ttt_steps, self.config.eval_draft_tokens)

        def remembering() -> Iterator[Batch]:
            for indices in batches:
                batch = self._held.load(indices)
                yield batch.to(self.objective.model.d2t.device)
                self._held.remember(batch)

        if self.average is not None:
            self.average.swap()
        try:
            # Every process evaluates the same records: the numbers agree without talking.
            return evaluate(
                self.objective, remembering(), steps=steps, draft_tokens=self.config.eval_draft_tokens
            )
        finally:
            distributed.release(self.objective.model)
            if self.average is not None:
                self.average.swap()

    def write(self, kind: str, values: dict[str, Any]) -> None:
        if self.log is None:
            return
        if kind == "train":
            values["peak_rss_bytes"] = runlog.peak_rss_bytes()
            values["damaged_records"] = len(self.damaged())
            if self.feed is not None:
                values |= self.feed.facts()
            values["lr"] = [g["lr"] for part in self.optimizers.parts for g in part.param_groups]
        self.log.write(kind, **values)
        scalars = {}
        for name in ("loss", "accuracy", "simulated_acceptance_per_position"):
            for k, v in enumerate(values.get(name, [])):
                if v is not None:
                    scalars[f"{kind}/{name}/draft_token_{k + 1}"] = v
        for name in ("tokens_per_s", "simulated_acceptance_length", "sampled_acceptance_length", "data_wait"):
            if name in values:
                scalars[f"{kind}/{name}"] = values[name]
        self.log.scalars(values["step"], scalars)

    def damaged(self) -> list[str]:
        """What was wrong with records that this process could not read."""
        return [text for d in (self._training, self._held) if d is not None for text in list(d.bad_records)]

    def save(self, state: LoopState) -> None:
        state.known = dict(self.used)
        folder = self.folder / "checkpoints"
        path = folder / checkpoint.name_for(state.step)
        checkpoint.save(
            path, self.objective.model, self.optimizers, self.average, self.generator, state, self.shared,
            write=self.group.first,
        )  # fmt: skip
        if self.group.first:
            checkpoint.prune(folder, self.config.keep_checkpoints)
        if self.mirror is not None:
            self.mirror.changed()

    def saved_best(self, state: LoopState, evaluation: Evaluation) -> None:
        self.best = evaluation
        self.export(state, evaluation)

    def export(self, state: LoopState, evaluation: Evaluation | None) -> None:
        """Write the drafter as it is now (its average, where one is kept); all processes call this."""
        if self.average is not None:
            self.average.swap()
        try:
            weights = distributed.whole_state(self.objective.model)
            if not self.group.first:
                return
            survey = self.survey if self.feed is None else self.feed.seen
            card = model_card(self.config, self.facts, survey, state, evaluation, self.target_name)
            export_drafter(building.plain_copy(self.objective.model, weights), self.folder / "drafter",
                           target=self.target, card=card, target_name=self.target_name, format=self.format,
                           draft_tokens=self.config.eval_draft_tokens,
                           learnt_from=captured_from(self.store, self.target))  # fmt: skip
        finally:
            if self.average is not None:
                self.average.swap()

    def predict(self) -> int:
        """Write how the exported drafter predicts held-out records; returns how many."""
        if not self.held.stretches:
            return 0
        trained = self.objective.model
        model = load_drafter(self.folder / "drafter", compute_dtype=trained.compute_dtype)
        lend_tables(model, self.target)
        model.to(trained.d2t.device)
        return write_predictions(
            self.folder / PREDICTIONS_NAME, model, data.Dataset(self.store, self.held, 0.0, self._columns()),
            draft_tokens=min(self.config.eval_draft_tokens, MAX_DRAFT_TOKENS), drafter=self.folder.name,
        )  # fmt: skip

    def close(self) -> None:
        self._stop_prefetching()

    def _stop_prefetching(self) -> None:
        if self.feed is not None:
            self.feed.close()
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _progress(self, done: float, note: str) -> None:
        if self.best is not None:
            note += f"  held-out acceptance {self.best.simulated_acceptance_length:.2f}"
        self.progress(done, note)


def open_inputs(shards: Path, target_path: Path | None, store: Any = None) -> tuple[Any, Target]:
    """Shards and target, each with a clear error when it is not there."""
    if store is None:
        from specdec_tap.shards import open_shards

        store = open_shards(shards)
    if len(store) == 0:
        raise InputError(
            f"no captured record in {str(shards)!r}; serve with the tap on, send requests, then train "
            "(specdec-tap shards ls shows what is there)"
        )
    path = target_path or getattr(store, "target_dir", None)
    if path is None:
        raise InputError(
            f"{str(shards)!r} holds no target/ folder; pass --target with the checkpoint of the model "
            "that was served"
        )
    target = load_target(path)
    header = store.header
    info = getattr(header, "target", None)
    if info is not None and info.hidden_size != target.hidden_size:
        raise InputError(
            f"the shards were captured from a model of hidden size {info.hidden_size:,}, but the target in "
            f"{str(path)!r} has {target.hidden_size:,}"
        )
    if getattr(header, "final_hidden", "post_norm") != "post_norm":
        raise InputError(
            f"the shards hold final_hidden {header.final_hidden!r}; training needs post_norm states "
            "(specdec-tap shards import --final-hidden pre_norm applies the norm)"
        )
    return store, target


def captured_from(store: Any, target: Target) -> Fingerprint:
    """Of the model that gave the shards' states; of ``target`` where they do not say."""
    info = getattr(store.header, "target", None)
    known = Fingerprint(getattr(info, "tables_sha256", None), getattr(info, "layers_sha256", None))
    return known if known.tables else fingerprint(target)


def check_weights(store: Any, target: Target) -> str | None:
    """What differs between ``target`` and the model that was captured, where training can still use it.

    Raises:
        InputError: Embedding, head or norm are another model's: states and teacher would not fit.
    """
    ours, captured = fingerprint(target), captured_from(store, target)
    what = captured.differs(ours)
    if what is not None and captured.tables != ours.tables:
        raise InputError(
            f"the target in {str(target.path)!r} has another {what} than the model that the shards were "
            "captured from, under sizes that agree (fingerprints differ); pass --target with the checkpoint "
            "that was served, or leave it out where the shards have a target/ folder"
        )
    return what


def check_supervised(survey: data.Survey, say: Callable[[str], None] = lambda text: None) -> None:
    """Stop before step 1 when nothing would be learnt; say when it is hardly anything."""
    if survey.supervised == 0:
        raise InputError(f"0 supervised tokens: nothing to train on. Found {survey.explain()}")
    share = survey.supervised / max(1, survey.tokens)
    if share < _FEW_SUPERVISED:
        say(
            f"warning: only {survey.supervised:,} of {survey.tokens:,} tokens ({share:.2%}) are supervised; "
            "below 2 % the spans of the answers are often wrong ('specdec-tap shards ls --records' shows "
            "them), else capture with SPECDEC_TAP_FINAL_HIDDEN=all to train on prompts too"
        )


def _survey(
    config: TrainConfig, target: Target, store: Any, indices: list[int], prompt_weight: float
) -> data.Survey:
    return data.survey(
        store,
        indices,
        vocab_size=target.vocab_size,
        max_length=config.max_length,
        prompt_weight=prompt_weight,
    )


def _counts(survey: data.Survey) -> dict[str, Any]:
    return {
        "records": survey.records, "tokens": survey.tokens, "generated_tokens": survey.generated,
        "supervised_tokens": survey.supervised, "left_out": dict(survey.skipped),
    }  # fmt: skip


def columns_of(captured: tuple[int, ...], chosen: tuple[int, ...]) -> list[int] | None:
    """Where the chosen layers lie among the captured ones; None when they are all of them."""
    return None if captured == chosen else [captured.index(i) for i in chosen]


def prepare_folder(folder: Path, *, resume: bool) -> None:
    """Create the run folder; an old run is never mixed with a new one."""
    check_free(folder, resume=resume)
    try:
        (folder / "checkpoints").mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as err:
        raise InputError(f"cannot write to {str(folder)!r}: {err.strerror or err}") from err


def check_free(folder: Path, *, resume: bool) -> None:
    """Refuse a run folder that holds something, unless the run in it is to go on."""
    if not resume and folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"{str(folder)!r} is not empty; choose another --out, or go on with --resume")


def readable_checkpoints(out: Path) -> list[Path]:
    """Checkpoints of a run, newest first, from the first whole one on."""
    paths = checkpoint.newest(out / "checkpoints")
    for i, path in enumerate(paths):
        try:
            checkpoint.read(path)
        except InputError:
            if path is paths[-1]:
                raise
            continue
        return paths[i:]
    return []


def _draft_ids_of(path: Path, vocab: int) -> Any:
    tensors, _ = checkpoint.read(path)
    d2t = tensors["model.d2t"]
    return None if len(d2t) == vocab else (torch.arange(len(d2t)) + d2t).numpy()


def pick_device(name: str, group: Group) -> torch.device:
    """The device of this process."""
    if name == "auto":
        name = f"cuda:{group.local_rank}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as err:
        raise ConfigError(f"device is {name!r}; expected cpu, cuda, cuda:1 or auto") from err
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r} but this torch sees no CUDA device; use --device cpu")
    return device


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory: giving 10 MB buffers back and faulting them in again costs more
    than math."""
    if os.name != "posix":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    m_trim_threshold, m_mmap_threshold = -1, -3
    mallopt(m_mmap_threshold, 32 << 20)
    mallopt(m_trim_threshold, (1 << 31) - 1)
