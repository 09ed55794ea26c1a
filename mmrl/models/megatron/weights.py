"""Trained weights over the ranks of Megatron-Core that share a model: parts of layers (tensor parallelism, Shoeybi et
al. 2019, arXiv 1909.08053), and layers in stages (pipeline parallelism).

The Hugging Face model stays in its place and lends its name, its config and its ``generate``. Outside of
``unsharded`` it has no weights but those of a vision tower (``mmrl.models.megatron.vision_tower``) or of a critic's
head, and a call of it is a call of this rank's ``GPTModel``: of all ranks that share a model, together, with the same
rows. Optimizer, copies and checkpoints work on parts of Hugging Face's own tensors (``mapping.parts``).

The gradients of a model that ranks share are reduced to the rank that updates each tensor. Stages on successive ranks
run by Megatron-Core's own schedules. One stage of layers a rank: one forward, one backward (PipeDream-flush, Narayanan
et al. 2021, arXiv 2006.09503). Several stages a rank, in turn: interleaved (Narayanan et al. 2021, arXiv 2104.04473,
section 2.2).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from mmrl.config.schema import Model, Train
from mmrl.core.errors import UserError, refuse
from mmrl.core.sharded_loading import Lifted
from mmrl.models.context_parallel import SplitRows
from mmrl.models.megatron import vision_tower
from mmrl.models.megatron.mapping import Place, apart, body, parts, places, refusals, sparse, text_config, tower
from mmrl.models.megatron.model import Groups, all_tokens, arrange, built, named
from mmrl.models.megatron.rows import Packed, packed
from mmrl.models.sharded import give_back
from mmrl.models.text.critic import Critic
from mmrl.models.text.likelihood import Vocabulary, token_log_probs
from mmrl.models.weights import Passed, exchange, outermost, probe

_TOLERANCE = 1e-3
"""By how much log-probs of the two models may differ when the weights were taken over; float32 parts by 1e-6."""
P = TypeVar("P")
R = TypeVar("R")


class Logits(NamedTuple):
    logits: Tensor


_SMALL = 1 << 16
"""Bytes from which a tensor on the CPU has a block of its own: a part of a layer is smaller than a shard of a model."""


class ModelParallel:
    """Final class; see ``mmrl.models.weights.Weights``. Changes ``module`` in place.

    All ranks must construct it together, from equal weights or from their own rows of them
    (``mmrl.core.sharded_loading``), which ``ranks`` have read. ``settings``: how many share a model (neighbours do),
    and how; those of ``context_parallel`` have the same weights, and other tokens of a row. In half precision
    (``model.dtype``) the model computes with rounded copies of weights that are float32, and gradients are added in
    float32. With ``distributed_optimizer`` ranks with the same weights divide what their optimizers step on, tensor by
    tensor, where Megatron-Core's own divides a buffer of all: moments keep their shapes, and go on in any layout.
    ``sent`` counts the bytes given to the ranks with the same weights. Raises ``UserError`` where
    Megatron-Core cannot train ``module``, or comes to other log-probs.
    """

    in_shards = True

    def __init__(
        self, module: Any, settings: Train, model: Model, sent: Counter[str], ranks: dist.ProcessGroup
    ) -> None:
        refuse(refusals(module, settings))
        size = self._size = settings.tensor_parallel
        self.width, self._unsharded = settings.width, False
        self._by_tokens = settings.sequence_parallel
        self._groups = arrange(settings, mixture=bool(sparse(module)))
        self._group = self._groups.layers
        # tokens go to experts of ranks that have other rows
        self.lockstep = bool(settings.tensor_parallel * settings.context_parallel % settings.expert_parallel)
        self._cut = None if self._groups.rows is None else SplitRows(self._groups.rows)
        self._module, self._whole_forward = module, module.forward
        lifted = Lifted(module, ranks)
        self._name_all(module, lifted)
        rows = text_config(module).vocab_size
        each = -(-rows // size)
        device = next(module.parameters()).device
        if device.type == "cpu":
            give_back(_SMALL)
        self._chunks = [
            chunk.to(device) for chunk in built(module, each * size, settings, recompute=model.gradient_checkpointing)
        ]
        self._by = size if self._by_tokens else 1
        self._sees = None
        if tower(module) is not None:
            self._sees = vision_tower.VisionTower(body(module), self._chunks[0], divided=self._by_tokens)
        self._call = self._valued if isinstance(module, Critic) else self._forward
        self.stages = Pipeline(self._chunks) if settings.pipeline_parallel > 1 else None
        first = each * self._group.rank()
        self._rows = max(0, min(each, rows - first))
        self._kept: Tensor | None = None
        if self._chunks[-1].post_process:
            self._chunks[-1].output_layer.register_forward_pre_hook(self._only_kept)
        both = (self._group, self._groups.experts)
        self._mesh, self._expert_mesh = (DeviceMesh.from_group(group, device.type) for group in both)
        twin = self._place_all(module)
        self._gradients = Gradients(
            self._ours,
            self._exact,
            self._groups,
            twin,
            by_tokens=self._by_tokens,
            among_copies=settings.distributed_optimizer,
            sent=sent,
        )
        others = {name for place in self._ours if not self._gradients.steps(place) for name in place.tensors}
        self.stepped = [name for name in self.mine if name not in others]
        self._take_over(lifted)
        self._vocabulary = self._module.vocabulary = Vocabulary(first, self._group)
        with lifted.on_demand():
            self._check()
        if model.dtype != "float32":  # weights to compute with
            for chunk in self._chunks:
                chunk.to(getattr(torch, model.dtype))
                chunk.config.pipeline_dtype = getattr(torch, model.dtype)  # of what stages send
            self._gradients.add_in_float32()
        self._empty()

    def _name_all(self, module: Any, lifted: Lifted) -> None:
        """Find what trains, and give ``module`` the weights that no layer of Megatron-Core takes."""
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.names = trained.keys()
        self._shapes = {name: lifted.shape(p) for name, p in trained.items()}
        self._apart = {name: p for name, p in trained.items() if name.startswith(apart(module))}
        self._theirs = {name: p for name, p in trained.items() if name not in self._apart}
        for name, p in module.named_parameters():
            if name not in self._theirs:
                lifted.put_back(p)

    # -- the model -----------------------------------------------------------------------------------------------------

    def _place_all(self, module: Any) -> Twin:
        """Find what lies on this rank, and which stage every tensor is on. Tied embeddings lie on the first, and for
        the output a second time on the last."""
        found, every = dict(named(self._chunks)) | self._apart, places(module)
        embedding = next(place for place in every if place.name.startswith("embedding"))
        tied = body(module).config.tie_word_embeddings and self._groups.stages.size() > 1
        if tied and embedding.name not in found and "output_layer.weight" in found:
            found[embedding.name] = found["output_layer.weight"]
        self._cuts = {name: place.cut for place in every for name in place.tensors}
        self._ours = {place: found[place.name] for place in every if place.name in found}
        self._exact = {place: p.data for place, p in self._ours.items()}
        self.mine: dict[str, Tensor] = self._parts(self._exact)
        lists: list[Any] = [None] * self._groups.stages.size()
        dist.all_gather_object(lists, list(self.mine), group=self._groups.stages)
        self._stage_of = {name: n for n in reversed(range(len(lists))) for name in lists[n]}
        return Twin(embedding, tied)

    def _forward(self, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: Tensor, **rest: Any) -> Logits:
        """Logits ``[B, T, this rank's part of the vocabulary]`` behind the columns ``logits_to_keep`` ``[T]`` of rows
        that are padded on the left. Here they are packed, or cut for the ranks that share them.

        Raises ``Passed`` on a stage that is not the last."""
        model = self._chunks[0] if self.stages is None else self.stages.now
        if self._cut is not None:
            rows, _ = self._cut.cut(input_ids, attention_mask, logits_to_keep, self._by)
            columns = self._cut.kept
            assert columns is not None
            self._kept = columns * len(rows) + torch.arange(len(rows), device=rows.device).unsqueeze(1)
            with torch.autocast(rows.device.type, enabled=False):
                out = model(rows, None, None)
        else:
            shape = None if self.stages is None else self.stages.shape
            them = packed(attention_mask, self._by, 0 if shape is None else shape[1])
            self._kept = them.ends[:, logits_to_keep]
            out = self._packed(model, them, input_ids=input_ids, attention_mask=attention_mask, **rest)
        if not model.post_process:
            raise Passed(out)
        return Logits(out[..., : self._rows])

    def _packed(self, model: Any, them: Packed, **inputs: Any) -> Tensor:
        """What ``model`` makes of the rows ``inputs``, packed so."""
        if self._sees is not None:
            return self._sees(them, **inputs)
        tokens = them.pack(inputs["input_ids"])
        with torch.autocast(tokens.device.type, enabled=False):
            return model(tokens, None, None, packed_seq_params=them)

    def _hidden(self, attention_mask: Tensor, **rest: Any) -> Tensor:
        """A critic's hidden states ``[B, L, H]`` float32 of rows ``[B, L]``, with 0 for their padding."""
        them = packed(attention_mask, self._by)
        hidden = self._packed(self._chunks[0], them, attention_mask=attention_mask, **rest)
        hidden = all_tokens(hidden) if self._by_tokens else hidden
        return them.unpack(hidden.squeeze(1).float())

    def _valued(self, **inputs: Any) -> Tensor:
        """The values of ``Critic.forward``. Each rank has the head, and the gradient of all of it."""
        hidden = self._hidden(**inputs)
        with torch.autocast(hidden.device.type, enabled=False):
            return self._module.head(hidden).squeeze(-1)

    def _only_kept(self, layer: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The hidden states ``[S, B, H]`` that logits are wanted of, ``[T, rows, H]``."""
        assert self._kept is not None
        hidden, *rest = given
        hidden = (all_tokens(hidden) if self._by_tokens else hidden).flatten(0, 1)
        index = self._kept.T
        return (hidden.index_select(0, index.flatten()).unflatten(0, index.shape), *rest)

    @torch.no_grad()
    def _take_over(self, lifted: Lifted) -> None:
        for name, p in self._theirs.items():
            whole = lifted.whole(p)  # of all ranks together, whoever has a part of it
            if (mine := self.mine.get(name)) is not None:
                mine.copy_(self._share(name, whole).view_as(mine))
        for place, exact in self._exact.items():
            if (
                place.cut == "rows"
            ):  # padding of the vocabulary: 0 is its gradient, and 0 times what is not finite is nan
                exact[self._rows :].zero_()

    def _share(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor of Hugging Face."""
        (placement,) = self._placements(name)
        if not isinstance(placement, Shard):
            return whole
        mesh = self._mesh_of(name)
        pieces, rank = whole.chunk(mesh.size(), placement.dim), mesh.get_local_rank()
        return pieces[rank] if rank < len(pieces) else whole.narrow(placement.dim, 0, 0)

    @torch.no_grad()
    def _check(self) -> None:
        """Compare with Hugging Face's own forward, on a row with padding: a config may say what nobody here reads."""
        if self._sees is None:
            given, picked = probe(text_config(self._module).vocab_size, 12, self._device)
        else:
            given, picked = vision_tower.probe(body(self._module).config, self._device)
        if isinstance(self._module, Critic):
            self._compare_hidden({k: given[k] for k in given.keys() - {"logits_to_keep"}})
            return
        whole = token_log_probs(self._whole_forward(**given).logits, picked, 1.0)

        def compare(_: int) -> Tensor:
            logits, cut = self._forward(**given).logits, self._cut
            mine = token_log_probs(logits, picked if cut is None else cut.own(picked), 1.0, self._vocabulary)
            mine = mine if cut is None else cut.whole(mine)
            return (whole - mine).abs().max().nan_to_num(torch.inf)

        found = [compare(0)] if self.stages is None else self.stages.through([0] * self.width, compare, graph=False)
        worst = torch.stack(found).max() if found else torch.zeros((), device=self._device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._groups.model)  # the last stage knows
        self._refuse_over(worst.item(), "log-probs")

    def _compare_hidden(self, given: dict[str, Any]) -> None:
        """The same of a critic, whose values are 0 as it begins."""
        there = given["attention_mask"].unsqueeze(-1)
        whole = body(self._module)(**given).last_hidden_state * there
        gap = (whole - self._hidden(**given) * there).abs().max() / whole.abs().max()
        self._refuse_over(gap.nan_to_num(torch.inf).item(), "hidden states")

    def _refuse_over(self, gap: float, what: str) -> None:
        if gap > _TOLERANCE:
            raise UserError(
                f"train.backend: megatron comes to other {what} than {type(body(self._module)).__name__} (by "
                f"{gap:.2g}): its config.json has a setting that is not known here; set train.backend to fsdp"
            )

    def _empty(self) -> None:
        for p in self._theirs.values():
            p.data = p.new_empty(0)
        self._module.forward, self._module.cut = self._call, self._cut

    # -- as Weights ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_gradients(self) -> None:
        found = self._gradients.gathered()
        for t in self.mine.values():
            t.grad = None
        for name, grad in self._parts(found).items():
            self.mine[name].grad = grad

    def norm(self) -> Tensor:
        total, of_experts = torch.zeros(2, device=self._device)
        for name, t in self.mine.items():
            counts = self._stage_of[name] == self._groups.stages.rank()  # of two stages that have it the first
            if t.grad is not None and self._cuts[name] == "experts":
                of_experts += t.grad.square().sum()
            elif t.grad is not None and counts and (self._divided(name) or self._group.rank() == 0):
                total += t.grad.square().sum()
        dist.all_reduce(total, group=self._groups.model)
        groups = (self._groups.experts, self._groups.stages) if "experts" in self._cuts.values() else ()
        if self._gradients.divided:
            dist.all_reduce(total, group=self._groups.copies)
            groups = (*groups, self._groups.expert_copies)
        for group in groups:
            dist.all_reduce(of_experts, group=group)
        return (total + of_experts).sqrt()

    def swap(self, copy: dict[str, Tensor]) -> None:
        exchange(self.mine, copy, unsharded=self._unsharded)
        self.changed()

    @torch.no_grad()
    def updated(self) -> None:
        self._gradients.updated()

    @torch.no_grad()
    def changed(self) -> None:
        for place, exact in self._exact.items():
            if self._ours[place].dtype != exact.dtype:
                self._ours[place].copy_(exact)

    @outermost
    def unsharded(self) -> Generator[None]:
        for name, p in self._theirs.items():
            p.data = self._from_stage(name)
        self._module.forward, self._module.vocabulary, self._module.cut = self._whole_forward, None, None
        try:
            yield
        finally:
            self._empty()
            self._module.vocabulary = self._vocabulary

    def checkpoint_view(self, name: str, mine: Tensor) -> Tensor:
        shape = self._shapes[name]
        local = mine if mine.ndim == len(shape) else mine.flatten(0, 1)
        if local.storage_offset():  # torch.distributed.checkpoint copies no DTensor whose part begins inside a storage
            local = local.clone()
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self._mesh_of(name), self._placements(name), run_check=False, shape=shape, stride=stride
        )

    def whole(self, name: str, mine: Tensor) -> Tensor:
        view = self.checkpoint_view(name, mine.detach())
        assert isinstance(view, DTensor)
        return view.full_tensor().contiguous()

    def _from_stage(self, name: str) -> Tensor:
        """The whole tensor on every rank; all ask together."""
        n, group = self._stage_of[name], self._groups.stages
        here = n == group.rank()
        whole = self.whole(name, self.mine[name]) if here else torch.empty(self._shapes[name], device=self._device)
        if group.size() > 1:
            dist.broadcast(whole, group=group, group_src=n)
        return whole

    @property
    def _device(self) -> torch.device:
        return next(self._chunks[0].parameters()).device

    # -- how tensors are divided ---------------------------------------------------------------------------------------

    def _parts(self, of: dict[Any, Tensor]) -> dict[str, Tensor]:
        """Tensors of Hugging Face in those of Megatron-Core, by name; in the order of the former."""
        config = text_config(self._module)
        heads, groups = config.num_attention_heads // self._size, config.num_key_value_heads // self._size
        found = {
            name: tensor
            for place, parameter in of.items()
            for name, tensor in zip(place.tensors, parts(place, parameter, heads, groups, self._rows), strict=True)
        }
        return {name: found[name] for name in self._shapes if name in found}

    def _mesh_of(self, name: str) -> DeviceMesh:
        """The ranks that divide it."""
        return self._expert_mesh if self._cuts[name] == "experts" else self._mesh

    def _divided(self, name: str) -> bool:
        return isinstance(self._placements(name)[0], Shard)

    def _placements(self, name: str) -> list[Placement]:
        cut = self._cuts[name]
        return [Replicate()] if cut in ("same", "shared", "apart") else [Shard(1 if cut == "columns" else 0)]


class Twin(NamedTuple):
    """The embedding; ``tied``: the last stage has it a second time, for the output."""

    place: Place
    tied: bool


class Gradients:
    """Final class: of this rank's parameters ``ours``, whose weights in float32 are ``exact``.

    ``among_copies``: ranks with the same weights divide what they step on, tensor by tensor. ``by_tokens``: ranks
    divide the tokens of what lies between the parts of layers. ``sent`` counts the bytes given to the ranks with the
    same weights.
    """

    def __init__(
        self,
        ours: Mapping[Place, nn.Parameter],
        exact: Mapping[Place, Tensor],
        groups: Groups,
        twin: Twin,
        sent: Counter[str],
        *,
        by_tokens: bool,
        among_copies: bool,
    ) -> None:
        self._ours, self._exact, self._groups, self._twin = ours, exact, groups, twin
        self._by_tokens, self._sent = by_tokens, sent
        self._sums: dict[Place, Tensor] | None = None
        self._owners: dict[Place, int] = {}
        if among_copies:
            self._divide()

    def _divide(self) -> None:
        """The next largest goes to who has the least."""
        loads = {copies: [0] * copies.size() for copies in (self._groups.copies, self._groups.expert_copies)}
        # what two stages have first: then both come to the same
        for place in sorted(self._exact, key=lambda p: (p is not self._twin.place, -self._exact[p].numel(), p.name)):
            load = loads[self._copies_of(place)]
            owner = self._owners[place] = load.index(min(load))
            load[owner] += self._exact[place].numel()

    @property
    def divided(self) -> bool:
        """Whether ranks with the same weights step on different ones."""
        return bool(self._owners)

    def steps(self, place: Place) -> bool:
        """Whether this rank steps on ``place``."""
        return self._owners.get(place) in (None, self._copies_of(place).rank())

    def add_in_float32(self) -> None:
        """Have gradients of rounded parameters added in float32."""
        self._sums = sums = {}

        for place, p in self._ours.items():

            def add(p: Tensor, place: Place = place) -> None:
                assert p.grad is not None
                sums[place] = sums[place] + p.grad if place in sums else p.grad.float()
                p.grad = None

            p.register_post_accumulate_grad_hook(add)

    def gathered(self) -> dict[Place, Tensor]:
        """The gradients of what this rank steps on, summed over all rows and parts, where any rank has one. Parameters
        are left without. All ranks call it together."""
        if (sums := self._sums) is None:
            sums = {place: p.grad for place, p in self._ours.items() if p.grad is not None}
        device = next(iter(self._exact.values())).device
        there = torch.tensor([float(place in sums) for place in self._ours], device=device)
        self._add(there, self._groups.copies)
        found = {}
        for n, (place, p) in zip(there.tolist(), self._ours.items(), strict=True):
            if n:
                gradient = sums.pop(place) if place in sums else torch.zeros_like(self._exact[place])
                self._add(gradient, self._copies_of(place), self._owners.get(place))
                if self.steps(place):
                    found[place] = self._over_parts(place, gradient)
            p.grad = None
        return found

    def updated(self) -> None:
        """Give the ranks with the same weights what this one stepped on, and take what they did."""
        for place, owner in self._owners.items():
            dist.broadcast(self._exact[place], group=self._copies_of(place), group_src=owner)
            self._sent["weights"] += self._exact[place].nbytes * self.steps(place)

    def _over_parts(self, place: Place, gradient: Tensor) -> Tensor:
        """With what other parts of the model add to it, in place."""
        if place.cut == "shared" or (place.cut == "same" and self._by_tokens):
            dist.all_reduce(gradient, group=self._groups.layers)
        if self._twin.tied and place is self._twin.place:
            dist.all_reduce(gradient, group=self._groups.ends)
        return gradient

    def _add(self, gradient: Tensor, copies: dist.ProcessGroup, owner: int | None = None) -> None:
        """In place, over the ranks ``copies`` that have the same part of the model: for the rank ``owner``, or for
        all."""
        if (n := copies.size()) == 1:
            return
        if owner is None:
            dist.all_reduce(gradient, group=copies)
            self._sent["gradients"] += 2 * (n - 1) * gradient.nbytes // n
        else:
            dist.reduce(gradient, group=copies, group_dst=owner)
            self._sent["gradients"] += gradient.nbytes * (owner != copies.rank())

    def _copies_of(self, place: Place) -> dist.ProcessGroup:
        return self._groups.expert_copies if place.cut == "experts" else self._groups.copies


class Pipeline:
    """Final class; see ``mmrl.models.weights.Stages``. ``chunks``: this rank's parts of the model, in their order."""

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        self._chunks = list(chunks)
        self._now: GPTModel | Callable[..., None] | None = None
        self.multiple = parallel_state.get_pipeline_model_parallel_world_size() if len(self._chunks) > 1 else 1
        self.shape: tuple[int, int] | None = None
        """Rows and columns to which all slices are padded if a rank has several stages. Such a rank waits for both
        neighbours at once in Megatron-Core, and would wait for ever if neighbours sent shapes first."""

    @property
    def now(self) -> GPTModel:
        """The part of the model that a call computes now. Raises ``RuntimeError`` outside of ``through``."""
        if self._now is None:
            raise RuntimeError("call a model in stages inside Policy.each or Policy.accumulate, once per slice")
        return self._now

    def through(self, pieces: Sequence[P], work: Callable[[P], R], *, graph: bool) -> list[R]:
        made: list[R] = []

        def step(left: Iterator[P], chunk: GPTModel) -> tuple[Tensor, Callable[..., object] | None]:
            piece, self._now = next(left), chunk
            try:
                found = work(piece)
            except Passed as passed:
                return passed.hidden, None
            finally:
                self._now = None
            if graph:
                assert isinstance(found, Tensor)
                return found, _loss
            made.append(found)
            return torch.zeros(()), _nothing

        if pieces:
            self.shape = self._largest(pieces, work) if len(self._chunks) > 1 else None
            rows, columns = self.shape or (1, 1)  # otherwise stages send the shapes (``variable_seq_lengths``)
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(pieces) for _ in self._chunks],
                model=self._chunks,
                num_microbatches=len(pieces),
                seq_length=columns,
                micro_batch_size=rows,
                forward_only=not graph,
                collect_non_loss_data=not graph,
            )
        return made

    def _largest(self, pieces: Sequence[P], work: Callable[[P], R]) -> tuple[int, int]:
        """The most rows and columns with which ``work`` calls the model."""
        found = []

        def look(rows: Tensor, *_: object, **__: object) -> None:
            found.append(tuple(rows.shape))
            raise Passed(rows)

        self.shape, self._now = None, look
        try:
            for piece in pieces:
                with contextlib.suppress(Passed):
                    work(piece)
        finally:
            self._now = None
        rows, columns = zip(*found, strict=True)
        return max(rows), max(columns)


def _loss(value: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss unchanged, because it has the update's denominator. The schedule does not divide a loss of three values
    (``calculate_per_token_loss``)."""
    return value, torch.ones((), dtype=torch.int), {}


def _nothing(_: Tensor, non_loss_data: bool) -> None:
    """Results are collected here and not by the schedule."""
