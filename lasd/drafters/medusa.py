"""Medusa heads and the drafter that fills a tree from them (Cai et al. 2024, section 2.1).

Legend: M positions, K heads, D hidden size, V vocabulary, B sequences, N tree nodes, T candidates a head.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor, nn

from lasd.decoding.tree import DraftTree, TreeShape
from lasd.devices import on_device
from lasd.drafters.base import Budget, DraftContext, StepOutcome
from lasd.errors import LasdError

if TYPE_CHECKING:
    from lasd.artifacts import Artifact
    from lasd.decoding.target import TargetModel

Projection = Literal["shared", "own"]


class Projector(Protocol):
    """What shared heads need of a target."""

    def project(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., D] -> logits [..., V]."""


class ResidualBlocks(nn.Module):
    """One residual block of each of the K heads: x <- x + SiLU(W x + b), with its own W and b a head. Starts as the
    identity."""

    def __init__(self, num_heads: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_heads, hidden_size))

    def forward(self, features_KMD: Tensor) -> Tensor:
        """[K, M, D] -> [K, M, D]."""
        inner = torch.baddbmm(self.bias.unsqueeze(1), features_KMD, self.weight.transpose(1, 2))
        return features_KMD + nn.functional.silu(inner)


class MedusaHeads(nn.Module):
    """K heads on the backbone's last hidden state; head k = 1..K at position t predicts token t + 1 + k (Medusa,
    equation 1).

    `shared` heads end in the target's own output embedding, `own` heads in a projection each (the paper's form). Both
    start as the target's own next-token prediction: blocks are the identity, own projections copy the output embedding.

    Args:
        hidden_size: D.
        num_heads: K.
        num_layers: residual blocks of a head, each with weights of its own.
        projection: "shared" or "own".
        vocab_size: V, for own projections.

    Attributes:
        token_map: int64 [U], or None; the tokens that heads may propose. Candidates then come from U rows of the
            projection instead of V: drafting gets cheaper, and the rarest tokens are never drafted (the target still
            emits them).
    """

    token_map: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_layers: int = 1,
        projection: Projection = "shared",
        vocab_size: int | None = None,
    ):
        super().__init__()
        if num_heads < 1 or num_layers < 1:
            raise LasdError(f"Medusa heads got num_heads={num_heads}, num_layers={num_layers}; both must be at least 1")
        if projection not in ("shared", "own"):
            raise LasdError(f"projection is {projection!r}; it must be 'shared' or 'own'")
        if projection == "own" and not vocab_size:
            raise LasdError("own projections need vocab_size: the rows of the target's output embedding")
        self.hidden_size, self.num_heads, self.num_layers, self.projection = (
            hidden_size,
            num_heads,
            num_layers,
            projection,
        )
        self.blocks = nn.ModuleList(ResidualBlocks(num_heads, hidden_size) for _ in range(num_layers))
        self.register_buffer("token_map", None)
        self._draft_rows: Tensor | None = None
        self.projection_weight: nn.Parameter | None = None
        if projection == "own":
            self.projection_weight = nn.Parameter(torch.zeros(num_heads, vocab_size or 0, hidden_size))

    def forward(self, hidden_MD: Tensor) -> Tensor:
        """What each head feeds to its projection: [M, D] -> [K, M, D]."""
        features_KMD = hidden_MD.expand(self.num_heads, *hidden_MD.shape)
        for block in self.blocks:
            features_KMD = block(features_KMD)
        return features_KMD

    def logits(self, hidden_MD: Tensor, target: Projector, heads: slice = slice(None)) -> Tensor:
        """Logits of the chosen heads: [M, D] -> [K, M, V]."""
        features_KMD = self(hidden_MD)[heads]
        if self.projection_weight is None:
            return target.project(features_KMD)
        return features_KMD @ self.projection_weight[heads].transpose(1, 2)

    def candidates(self, hidden_MD: Tensor, target: "TargetLike", width: int, heads: slice = slice(None)) -> Tensor:
        """The likeliest tokens of the chosen heads, likeliest first: [M, D] -> int64 [K, M, width]."""
        if self.token_map is None:
            return self.logits(hidden_MD, target, heads).topk(width, dim=-1).indices
        rows = self._rows_of_map(target)
        features_KMD = self(hidden_MD)[heads]
        if rows is None:  # an output embedding that is more than a matrix: its logits are computed whole
            logits_KMU = self.logits(hidden_MD, target, heads)[..., self.token_map]
        elif rows.dim() == 2:
            logits_KMU = nn.functional.linear(features_KMD, rows)
        else:
            logits_KMU = features_KMD @ rows[heads].transpose(1, 2)
        return self.token_map[logits_KMU.topk(width, dim=-1).indices]

    def _rows_of_map(self, target: "TargetLike") -> Tensor | None:
        """The projection's rows of the mapped tokens, gathered once: [U, D] (shared), [K, U, D] (own), or None.

        A family's logit tail is left out: it keeps the order of logits.
        """
        assert self.token_map is not None
        if self._draft_rows is None:
            if self.projection_weight is not None:
                self._draft_rows = self.projection_weight.detach()[:, self.token_map]
            elif type(target.lm_head) is nn.Linear and target.lm_head.bias is None:
                self._draft_rows = target.lm_head.weight.detach()[self.token_map]
        return self._draft_rows

    @torch.no_grad()
    def init_own_from(self, output_embedding: Tensor) -> None:
        """Own projections become copies of the target's output embedding [V, D]."""
        if self.projection_weight is None:
            raise LasdError("shared heads have no projection of their own to initialise")
        self.projection_weight.copy_(output_embedding.expand_as(self.projection_weight))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "MedusaHeads":
        """Heads from the tensors of a safetensors file; counts and sizes are the tensors' own.

        Raises:
            LasdError: names or shapes are not those of Medusa heads.
        """
        num_layers = sum(name.startswith("blocks.") and name.endswith(".weight") for name in tensors)
        own = tensors.get("projection_weight")
        first = tensors.get("blocks.0.weight")
        if first is None or first.dim() != 3 or first.shape[1] != first.shape[2]:
            found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in list(tensors.items())[:4]) or "nothing"
            raise LasdError(f"Medusa heads need blocks.0.weight [heads, hidden, hidden]; the file holds {found}")
        num_heads, hidden_size = first.shape[0], first.shape[1]
        token_map = tensors.get("token_map")
        with torch.device("meta"):
            heads = cls(
                hidden_size,
                num_heads,
                num_layers,
                "shared" if own is None else "own",
                None if own is None else own.shape[1],
            )
        expected = {name: tuple(tensor.shape) for name, tensor in heads.state_dict().items()}
        found_shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name != "token_map"}
        if expected != found_shapes:
            wrong = sorted(set(expected.items()) ^ set(found_shapes.items()))
            raise LasdError(
                f"the heads file does not hold {num_heads} whole heads: {wrong[:4]} differ; train or download it again"
            )
        if token_map is not None:
            if (
                token_map.dtype != torch.int64
                or token_map.dim() != 1
                or token_map.unique().numel() != token_map.numel()
            ):
                found = f"{str(token_map.dtype)[6:]} {list(token_map.shape)}"
                raise LasdError(f"token_map is {found}; it must hold different token ids, int64 [tokens]")
            heads.token_map = token_map  # a buffer: state_dict names it from now on
        heads.load_state_dict(dict(tensors), assign=True)
        return heads


class MedusaDrafter:
    """Fills one static tree from the heads' likeliest tokens, for all live sequences in one product, on the device.

    Args:
        heads: on the device of the target's output embedding, in the target's dtype.
        shape: the tree; its `ranks` say which candidate of its depth's head each node holds.
        target: whose output embedding shared heads use.

    Raises:
        LasdError: the tree is deeper than the heads, or asks for more candidates than the vocabulary has.
    """

    def __init__(self, heads: MedusaHeads, shape: TreeShape, target: "TargetLike"):
        if heads.hidden_size != target.hidden_size:
            raise LasdError(
                f"the heads read hidden states of size {heads.hidden_size}, the model has {target.hidden_size}; use "
                "heads of this model"
            )
        if heads.token_map is not None and int(heads.token_map.max()) >= target.vocab_size:
            raise LasdError(
                f"the heads' token map names token {int(heads.token_map.max())}, the model has {target.vocab_size}; "
                "use "
                "heads of this model"
            )
        shape.validate(heads.num_heads, target.vocab_size if heads.token_map is None else len(heads.token_map))
        self.heads = heads.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
        self.shape, self.target = shape, target
        self.max_nodes = shape.num_nodes
        self._picks: dict[tuple[TreeShape, torch.device], Tensor] = {}

    def start(self, context: DraftContext) -> None:
        """Heads keep no state."""

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[Budget]) -> list[DraftTree]:
        """The tree's nodes hold the heads' candidates at the position before the root; smaller budgets cut the tree."""
        shapes = [self.shape.limited(budget.max_nodes, budget.max_depth) for budget in budgets]
        device = contexts[0].hidden_D.device
        roots_B = on_device([context.root for context in contexts], device)
        deepest = max(shape.max_depth for shape in shapes)
        if deepest == 0:
            return [DraftTree(shape, root) for shape, root in zip(shapes, roots_B.split(1), strict=True)]
        hidden_BD = torch.stack([context.hidden_D for context in contexts])
        width = max(self.shape.ranks) + 1
        candidates_KBT = self.heads.candidates(hidden_BD, self.target, width, slice(0, deepest))
        candidates_BKT = candidates_KBT.transpose(0, 1)
        flat_BC = torch.cat([roots_B.unsqueeze(1), candidates_BKT.flatten(1)], 1)
        return [
            DraftTree(shape, flat_C[self._columns(shape, width, device)])
            for shape, flat_C in zip(shapes, flat_BC, strict=True)
        ]

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Heads keep no state."""

    def _columns(self, shape: TreeShape, width: int, device: torch.device) -> Tensor:
        """int64 [N]: for each node, its place in (root, head 1's candidates, head 2's candidates, ...)."""
        key = (shape, device)
        if key not in self._picks:
            places = [0] + [
                1 + (depth - 1) * width + rank for depth, rank in zip(shape.depths[1:], shape.ranks[1:], strict=True)
            ]
            self._picks[key] = on_device(places, device)
        return self._picks[key]


class TargetLike(Projector, Protocol):
    """What the drafter needs of a target."""

    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    lm_head: nn.Module


def from_artifact(
    artifact: "Artifact | None", target: "TargetModel", tree: Sequence[Sequence[int]] | None = None
) -> MedusaDrafter:
    """The drafter of a `medusa` artifact.

    The tree is the given path list, else the artifact's profile for this device, else its default tree, else a chain
    of K.
    """
    if artifact is None or artifact.manifest.kind != "medusa":
        got = "none was given" if artifact is None else f"{artifact.path} holds {artifact.manifest.kind!r}"
        raise LasdError(
            f"method medusa needs an artifact of trained heads, but {got}; pass --artifact DIR or train heads first"
        )
    heads = MedusaHeads.from_tensors(artifact.tensors())
    profile = artifact.profile_for(target) or {}
    paths = tree or profile.get("tree") or artifact.manifest.settings.get("tree")
    shape = TreeShape.from_paths(paths) if paths else TreeShape.chain(heads.num_heads)
    return MedusaDrafter(heads, shape, target)
