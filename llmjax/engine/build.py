"""Builds an engine from a configuration: loads the model, measures and divides memory, and compiles the steps."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from llmjax.checkpoint.identity import fingerprint
from llmjax.checkpoint.resolve import resolve_model
from llmjax.collector import paused
from llmjax.config import EngineConfig
from llmjax.engine.core.adapters import AdapterSlots
from llmjax.engine.core.kv_cache import KVCache
from llmjax.engine.core.media_rows import MediaRows
from llmjax.engine.core.pace import Pace
from llmjax.engine.core.scheduler import Scheduler
from llmjax.engine.device.runner import Runner
from llmjax.engine.drafts.automatic import with_automatic_drafts
from llmjax.engine.drafts.draft_model import check_draft, draft_bytes, load_draft
from llmjax.engine.drafts.speculation import Speculation, check_speculative
from llmjax.engine.front.generation_config import check_generation_config
from llmjax.engine.loaded import LoadedEngine
from llmjax.engine.loading.copies import check_copies
from llmjax.engine.loading.memory import check_memory, page_bytes_by_span, plan_kv
from llmjax.engine.loading.model import LoadedModel, check_stages, load_model
from llmjax.engine.loading.need import Admit, Unread, card_need, for_vectors, memory_need, opens_card
from llmjax.engine.need import Need
from llmjax.engine.programs.cache import ProgramCache
from llmjax.engine.programs.compilations import CompileCounter
from llmjax.engine.programs.compiler import StepCompiler
from llmjax.engine.programs.graphs import check_graphs, with_graphs
from llmjax.engine.programs.signature import digest
from llmjax.engine.ranks.alone import Alone
from llmjax.engine.ranks.group import Group, RankZero, StartedRanks
from llmjax.engine.ranks.leader import Leader
from llmjax.engine.ranks.local import LocalRanks
from llmjax.engine.tiers.events import CacheEvents
from llmjax.engine.tiers.publisher import EventPublisher
from llmjax.engine.tiers.setup import tier_of, transfer_of
from llmjax.engine.tiers.transfer import bind
from llmjax.engine.tuning.choose import choose
from llmjax.errors import ConfigError
from llmjax.host_memory import free_memory
from llmjax.jax_settings import use_compilation_cache
from llmjax.kernels.attention import KVLayout
from llmjax.machine_share import WHOLE_MACHINE, MachineShare
from llmjax.platforms import select_platform

logger = logging.getLogger(__name__)

DECODE_STEPS = 8  # most in one dispatch: an eighth of its host cost is little compared with any step
MICRO_BATCHES = 2  # with pipeline stages: one step is read here while the next one runs
CHUNK_STEPS = 4  # for 16 tokens, the least that a mixed step computes; measured with SmolLM2


@paused()
def build_engine(
    config: EngineConfig,
    share: MachineShare = WHOLE_MACHINE,
    *,
    located: Callable[[Path], None] = lambda path: None,
    admit: Admit | None = None,
) -> LoadedEngine:
    """Loads the model and starts to compile its step programs.

    Args:
        share: this engine's part of the machine, where several engines divide it; the first of them shows the progress
            of loading.
        located: called with the model's path, before anything of it is read.
        admit: called with what the engine needs before it takes it, and returns when it may; None: nobody is asked. The
            share then says what there is for all engines together.

    Raises:
        CheckpointError: the model cannot be found or read.
        CompileError: XLA refuses a program that is needed to know how much memory steps take.
        ConfigError: a setting does not fit the device, its memory or the model, or ranks do not fit each other.
    """
    if config.node_rank:
        raise ConfigError(
            f"node_rank {config.node_rank}: requests go to rank 0; start this one with llmjax serve or LLM"
        )
    transfer = config.kv_transfer
    secret = config.master_secret  # the secret of other servers; ranks that are started here have their own
    with ExitStack() as undo:
        # An address that is in use is known before anything is started or loaded.
        bound = None if transfer is None or not transfer.gives else undo.enter_context(bind(transfer))
        if config.is_staged:
            check_stages(config)
        local = LocalRanks(config) if config.multi_process or (config.is_staged and config.nnodes == 1) else None
        if local is not None:
            config, share = local.config, local.share
            undo.callback(local.end)
        group = lead(config, local)
        undo.callback(group.close)
        group.end_with_process()
        publisher = None if config.kv_events is None else EventPublisher(config.kv_events, rank=share.rank)
        if publisher is not None:
            undo.callback(publisher.close)
        config, compiler = load(config, group, share, located=located, admit=admit)
        engine = _engine(config.replace(master_secret=secret), compiler, group, publisher, bound)
        undo.pop_all()
    return engine


def lead(config: EngineConfig, local: StartedRanks | None = None) -> RankZero:
    """The group of rank 0, once all ranks are there; see `Leader` for arguments and errors."""
    return Alone() if config.nnodes == 1 else Leader(config, local)


def load(
    config: EngineConfig,
    group: Group,
    share: MachineShare = WHOLE_MACHINE,
    *,
    located: Callable[[Path], None] = lambda path: None,
    admit: Admit | None = None,
) -> tuple[EngineConfig, StepCompiler]:
    """Loads this process's part of the model, and divides its memory; see ``build_engine`` for arguments and errors.

    Returns:
        The configuration, with what follows from the model, and the compiler of its steps.
    """
    check_generation_config(config)
    cache_dir = use_compilation_cache(config.compilation_cache_dir)
    if group.neighbors > 1 and share.host_memory is None:  # before any of them takes some
        share = replace(share, host_memory=free_memory() // group.neighbors)
    if admit is not None and opens_card(config):
        admit(card_need(config))
        admit = None
    platform = select_platform(config, share, meet=group.meet)
    if admit is not None and not platform.is_cpu:
        admit(card_need(config))
        admit = None
    config = config.with_sizes(platform.step_sizes)
    check_graphs(config, platform)
    check_copies(config, platform)
    if not config.is_staged and platform.is_cpu and group.shares_memory(len(platform.devices)):
        platform = replace(platform, sums_in_memory=True)
    programs = ProgramCache.of(cache_dir, platform.device)
    progress = share.rank == 0 and config.node_rank == 0
    if config.speculative is not None and config.speculative.model is not None:
        check_draft(config, config.speculative, platform)
    path = resolve_model(config)
    located(path)
    say = logger.info if progress else logger.debug
    say("loading %s", path)
    needs: list[Need] = []

    def ask(unread: Unread) -> None:
        assert admit is not None
        more = replace(unread, weight_bytes=unread.weight_bytes + draft_bytes(config, platform))
        budget = platform.free_memory() if share.host_memory is None else share.host_memory
        needs.append(memory_need(config, more, platform, budget=budget))
        admit(needs[0])

    model = load_model(
        config,
        platform,
        path=path,
        cache_dir=cache_dir,
        programs=programs,
        progress=progress,
        reading=None if admit is None else ask,
    )
    if needs:
        config = config.replace(kv_cache_memory_bytes=needs[0].kv_bytes)
    say("the weights are there after %.1f s; the step programs are compiled, or read as kept", model.load_seconds)
    choices = group.choose(lambda: choose(model.params.values(), platform, cache_dir))
    config = for_vectors(config, model.config, platform)
    config = with_automatic_drafts(config, model, platform)
    speculative = config.speculative
    if speculative is not None:
        check_speculative(speculative, model.graph.config, max_num_batched_tokens=config.max_num_batched_tokens)
    layout = KVLayout.of(
        platform.kv_dtype(config.kv_cache_dtype),
        page_size=config.page_size,
        calibrated=model.kv_calibration is not None,
    )
    draft, beside, mapped = None, {}, model.mapped_bytes
    if speculative is not None and speculative.model is not None:
        draft = load_draft(config, speculative, platform, model, cache_dir=cache_dir, progress=share.rank == 0)
        own = replace(layout, token_scales=layout.dtype.itemsize == 1 and draft.kv_calibration is None)
        beside = page_bytes_by_span(draft.graph.config, own)
        mapped += draft.mapped_bytes
    if config.is_staged:  # pages are counted for the groups of all stages
        beside = dict.fromkeys(model.config.spans, 0)
    plan = partial(plan_kv, model=model.graph.config, platform=platform, layout=layout, beside=beside)
    kv_plan = plan(config, reserved=mapped)
    check_memory(config, model.config, platform, kv_plan, reserved=mapped, beside=beside)
    compiler = StepCompiler(
        model=model,
        platform=platform,
        kv_plan=kv_plan,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        max_logprobs=config.max_logprobs,
        # Without graphs the condition of a loop on an accelerator is a round trip to the host.
        # A step of a stage needs what another one has sampled.
        decode_steps=1 if config.is_staged else config.decode_steps or (DECODE_STEPS if platform.is_cpu else 1),
        cache=programs,
        drafts=0 if speculative is None else speculative.num_speculative_tokens,
        drafted_rows=0 if speculative is None else speculative.disable_by_batch_size,
        draft_model=draft,
        choices=choices,
    )
    if not platform.is_cpu and config.kv_cache_memory_bytes is None:
        reserved = compiler.bytes_beside_kv()
        kv_plan = plan(config, reserved=reserved)
        compiler = replace(compiler, kv_plan=kv_plan)
    if group.size > 1:
        fused = None if model.fused is None else fingerprint(model.fused)
        same = digest(model.digest, fingerprint(path), fused, config.max_num_seqs, config.max_num_batched_tokens)
        kv_plan = plan(config, agreed=group.agree(same, [one.num_pages for one in kv_plan.groups]))
        compiler = replace(compiler, kv_plan=kv_plan)
    if config.is_staged:
        return config, compiler
    return config, with_graphs(compiler, config, decode_steps=config.decode_steps or DECODE_STEPS)


def _engine(
    config: EngineConfig,
    compiler: StepCompiler,
    group: RankZero,
    publisher: EventPublisher | None,
    bound: socket.socket | None,
) -> LoadedEngine:
    model, kv_plan = compiler.model, compiler.kv_plan
    if publisher is not None and not model.config.causal:
        raise ConfigError("kv_events_config: this model sees each text as a whole, so texts share no pages")
    giver, taker = transfer_of(config, compiler, group, bound)
    kv = KVCache(
        kv_plan.groups,
        page_size=config.page_size,
        num_slots=config.max_num_seqs,
        pages_per_sequence=kv_plan.pages_per_sequence,
        # Where tokens attend to later ones, KV entries depend on the whole text, so no other text can share them.
        share_prefixes=config.enable_prefix_caching and model.config.causal,
        prompt_kind=_prompt_kind(model, compiler.draft_model),
        tier=tier_of(config, compiler, group, taker),
        listener=None if publisher is None else CacheEvents.of(publisher, kv_plan, model.config),
        giver=giver,
    )
    runner = Runner(compiler, config, group=group)
    adapters = None if model.adapters is None else AdapterSlots(config.max_loras, runner)
    return LoadedEngine(
        config=config,
        platform=compiler.platform,
        model=model,
        kv_plan=kv_plan,
        kv=kv,
        scheduler=Scheduler(
            kv,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=compiler.max_num_batched_tokens,
            whole_prompts=not model.config.causal,
            chunk_steps=CHUNK_STEPS if compiler.platform.is_cpu else 0,
            micro_batches=MICRO_BATCHES if config.is_staged else 1,
            media=None
            if compiler.media is None
            else MediaRows(compiler.media.num_rows, budget=compiler.max_num_batched_tokens, adapters=adapters),
            adapters=adapters,
        ),
        runner=runner,
        pace=Pace(compiler.decode_steps),
        speculation=None if config.speculative is None else Speculation(config.speculative),
        compilations=CompileCounter(),  # listens until it is closed: nothing before this may have failed
    )


def _prompt_kind(*models: LoadedModel | None) -> Callable[[int], tuple[int, ...]]:
    """Returns a function that gives the kind of a prompt from its length: prompts of one kind have the same KV entries
    for the same tokens in all models."""
    kinds = [model.config.prompt_kind for model in models if model is not None]
    return lambda prompt_len: sum((kind(prompt_len) for kind in kinds), ())
