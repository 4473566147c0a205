"""Medusa heads: parameters, candidates, and what is refused."""

import pytest
import torch

from lasd.decoding.target import TargetModel
from lasd.decoding.tree import TreeShape
from lasd.drafters.base import Budget, DraftContext
from lasd.drafters.medusa import MedusaDrafter, MedusaHeads
from lasd.errors import LasdError
from tests.families import tiny_model


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_model("llama"))


def random_heads(target, **changes) -> MedusaHeads:
    torch.manual_seed(3)
    heads = MedusaHeads(target.hidden_size, 3, **changes)
    for parameter in heads.parameters():
        parameter.data.normal_(0, 0.3)
    return heads.requires_grad_(False)


def test_fresh_heads_predict_what_the_model_predicts(target):
    hidden = torch.randn(5, target.hidden_size)
    own = MedusaHeads(target.hidden_size, 2, projection="own", vocab_size=target.vocab_size)
    own.init_own_from(target.lm_head.weight)
    for heads in (MedusaHeads(target.hidden_size, 2, num_layers=2), own):
        torch.testing.assert_close(heads.logits(hidden, target), target.project(hidden).expand(2, -1, -1))


def test_every_layer_of_every_head_has_weights_of_its_own(target):
    heads = random_heads(target, num_layers=2)
    hidden = torch.randn(4, target.hidden_size)
    before = heads(hidden)
    heads.blocks[1].weight.data[1] += 1.0
    changed = (heads(hidden) != before).flatten(1).any(1)
    assert changed.tolist() == [False, True, False]


@pytest.mark.parametrize("projection", ["shared", "own"])
def test_heads_survive_a_round_trip_through_their_tensors(target, projection):
    heads = random_heads(target, num_layers=2, projection=projection, vocab_size=target.vocab_size)
    heads.token_map = torch.tensor([3, 9, 1])
    again = MedusaHeads.from_tensors({name: value.clone() for name, value in heads.state_dict().items()})
    hidden = torch.randn(4, target.hidden_size)
    assert (again.num_heads, again.num_layers, again.projection) == (3, 2, projection)
    assert torch.equal(again.logits(hidden, target), heads.logits(hidden, target))
    assert again.token_map.tolist() == [3, 9, 1]


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize("projection", ["shared", "own"])
def test_candidates_of_a_token_map_are_the_likeliest_of_its_tokens(projection, family):
    target = TargetModel(tiny_model(family))
    heads = random_heads(target, projection=projection, vocab_size=target.vocab_size)
    hidden = torch.randn(6, target.hidden_size)
    logits = heads.logits(hidden, target)
    assert torch.equal(heads.candidates(hidden, target, 4), logits.topk(4, dim=-1).indices)
    heads.token_map = torch.arange(1, target.vocab_size, 3)
    forbidden = torch.full_like(logits, -torch.inf)
    forbidden[..., heads.token_map] = logits[..., heads.token_map]
    assert torch.equal(heads.candidates(hidden, target, 4), forbidden.topk(4, dim=-1).indices)


def test_a_tree_is_filled_by_rank_and_depth(target):
    heads = random_heads(target)
    shape = TreeShape.from_paths([(0,), (2,), (2, 1), (2, 1, 0)])
    hidden = torch.randn(target.hidden_size)
    context = DraftContext(0, [5, 7], 1, hidden)
    (tree,) = MedusaDrafter(heads, shape, target).propose([context], [Budget(9, 9)])
    best = heads.logits(hidden[None], target)[:, 0].topk(3, dim=-1).indices
    assert tree.tokens_N.tolist() == [7, best[0, 0], best[0, 2], best[1, 1], best[2, 0]]


def test_a_small_budget_cuts_the_tree(target):
    drafter = MedusaDrafter(random_heads(target), TreeShape.from_dense([3, 2, 1]), target)
    contexts = [DraftContext(i, [5], 0, torch.randn(target.hidden_size)) for i in range(3)]
    trees = drafter.propose(contexts, [Budget(99, 99), Budget(4, 99), Budget(99, 0)])
    assert [tree.shape.num_nodes for tree in trees] == [16, 4, 1]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": torch.zeros(2)}, r"need blocks.0.weight .* holds x \[2\]"),
        ({"blocks.0.weight": torch.zeros(2, 4, 4)}, "does not hold 2 whole heads"),
        (
            {"blocks.0.weight": torch.zeros(2, 4, 4), "blocks.0.bias": torch.zeros(2, 4), "token_map": torch.zeros(3)},
            "token_map is float32",
        ),
    ],
)
def test_tensors_that_are_no_heads_are_refused(tensors, message):
    with pytest.raises(LasdError, match=message):
        MedusaHeads.from_tensors(tensors)


def test_heads_of_another_model_and_deep_trees_are_refused(target):
    with pytest.raises(LasdError, match="hidden states of size 8, the model has 32"):
        MedusaDrafter(MedusaHeads(8, 2), TreeShape.chain(2), target)
    with pytest.raises(LasdError, match="the tree is 4 deep, but there are 3 heads"):
        MedusaDrafter(random_heads(target), TreeShape.chain(4), target)
    heads = random_heads(target)
    heads.token_map = torch.tensor([1, 500])
    with pytest.raises(LasdError, match="names token 500, the model has 61"):
        MedusaDrafter(heads, TreeShape.chain(2), target)
