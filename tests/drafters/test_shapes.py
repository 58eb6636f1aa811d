"""Trees from a drafting model: their shapes, their q, and that the output stays the same."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafting import drafter_of
from tests.matrix import LOSSLESS, PROMPTS, takes_any_tree, tiny_llm
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model
from tokenleap import LLM, ConfigError, SamplingParams
from tokenleap.control import Budget
from tokenleap.core.acceptance import RULES
from tokenleap.core.distribution import Distribution
from tokenleap.core.noise import Noise
from tokenleap.core.tree import Draft, chain
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.model_drafter import ModelDrafter
from tokenleap.drafters.models import OwnModel
from tokenleap.drafters.shapes import Dynamic, Node, Paths, TreeOptions, Widths
from tokenleap.request import Request
from tokenleap.runtime.target import Target

TREES: dict[str, dict[str, Any]] = {
    "widths": {"tree": [3, 2, 1]},
    "paths": {"tree": [[0], [0, 0], [0, 0, 0], [1], [1, 0], [2]]},
    "dynamic": {"tree": "dynamic", "gamma": 10, "tree_depth": 4},
    "top_k": {"tree": [2, 2], "expansion": "top_k"},
    "sample": {"tree": [2, 2], "expansion": "sample"},
    "with_replacement": {"tree": [2, 2], "expansion": "sample_with_replacement"},
}
ON_TREES = [
    (rule, shape)
    for rule in LOSSLESS
    for shape in TREES
    if takes_any_tree(rule) or (RULES[rule].takes_trees and shape == "with_replacement")
]


def tree_llm(rule: str, shape: str, **fields: Any) -> LLM:
    """An LLM whose draft model drafts trees of this shape."""
    return tiny_llm(tiny_model(), "draft_model", rule, **{"gamma": None, **TREES[shape], **fields})


GREEDY = SamplingParams(temperature=0, max_tokens=16)
SEEDED = SamplingParams(temperature=0.9, seed=3, max_tokens=16, frequency_penalty=0.4)


@cache
def plain(params: SamplingParams) -> list[tuple[int, ...]]:
    return [output.token_ids for output in tiny_llm(tiny_model()).generate(PROMPTS, params)]


@pytest.mark.parametrize(("rule", "shape"), ON_TREES)
def test_the_output_is_plain_decodings(rule: str, shape: str) -> None:
    llm = tree_llm(rule, shape, model=tiny_model())
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == plain(GREEDY)
    for output in outputs:
        assert output.metrics.mean_acceptance_length > 2  # the draft model is the target
    if rule == "coupled":
        assert [output.token_ids for output in llm.generate(PROMPTS, SEEDED)] == plain(SEEDED)


@pytest.mark.parametrize("shape", ["widths", "dynamic", "with_replacement"])
def test_the_default_controller_cuts_trees(shape: str) -> None:
    outputs = tree_llm("coupled", shape, controller="cost_model").generate(PROMPTS, SEEDED)
    assert [output.token_ids for output in outputs] == plain(SEEDED)


@cache
def drafter_for(shape: str) -> Drafter:
    return drafter_of(tree_llm("rejection", shape))


def draft_of(shape: str, budget: Budget, temperature: float = 1.0) -> Draft:
    (draft,) = drafter_for(shape).propose([request_of(temperature)], [budget])
    return draft


def request_of(temperature: float = 0) -> Request:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=99)
    return Request(PROMPTS[0], params, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)


@pytest.mark.parametrize(
    ("shape", "parents"),
    [
        ("widths", (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9)),
        ("paths", (-1, 0, 0, 0, 1, 2, 4)),
        ("top_k", (-1, 0, 0, 1, 1, 2, 2)),
    ],
)
def test_static_shapes(shape: str, parents: tuple[int, ...]) -> None:
    assert draft_of(shape, Budget(99, 99)).tree.parents == parents


@pytest.mark.parametrize("shape", list(TREES))
@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (3, 2), (7, 1), (9, 3)])
def test_budgets_are_kept(shape: str, nodes: int, depth: int) -> None:
    tree = draft_of(shape, Budget(nodes, depth)).tree
    assert 0 < tree.num_drafted <= nodes
    assert max(tree.depths) <= depth


def test_dynamic_trees_keep_the_most_probable() -> None:
    """Of a complete tree, by brute force over the path probabilities of the draft model."""
    model = tiny_model(seed=1)
    draft = draft_of("dynamic", Budget(10, 2), temperature=0)

    def distribution_after(path: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.tensor([[*PROMPTS[0], *path]])
            distribution: torch.Tensor = model(input_ids=ids).logits[0, -1].softmax(-1)
            return distribution

    ranked: list[tuple[float, tuple[int, ...]]] = []
    first = distribution_after(()).topk(4)
    for p, token in zip(first.values.tolist(), first.indices.tolist(), strict=True):
        ranked.append((p, (token,)))
        below = distribution_after((token,)).topk(4)
        ranked += [
            (p * q, (token, t))
            for q, t in zip(below.values.tolist(), below.indices.tolist(), strict=True)
        ]
    expected = {path for _, path in sorted(ranked, reverse=True)[:10]}
    tree = draft.tree
    assert {tuple(tree.path_tokens(node)) for node in range(1, len(tree))} == expected


def test_distributions_without_replacement_exclude_earlier_siblings() -> None:
    draft = draft_of("sample", Budget(99, 99))
    tree = draft.tree
    for node in range(1, len(tree)):
        siblings = [n for n in tree.children[tree.parents[node]] if n < node]
        distribution = draft.q_of(node)
        assert float(distribution.probs.sum()) == pytest.approx(1, abs=1e-5)
        assert all(distribution.prob(tree.tokens[n]) == 0 for n in siblings)
        assert distribution.prob(tree.tokens[node]) > 0


def test_distributions_with_replacement_are_the_same_for_siblings() -> None:
    draft = draft_of("with_replacement", Budget(99, 99))
    first, second = draft.tree.children[0]
    assert torch.equal(draft.q_of(first).probs, draft.q_of(second).probs)


def test_draws_without_replacement_have_the_distribution_of_successive_draws() -> None:
    """Pairs over 4,000 positions, each count within 6 standard deviations (2e-9 by accident)."""
    distribution = Distribution.of(torch.tensor([0.5, 0.3, 0.2]))
    noise, samples = Noise(1), 4000
    pairs = [tuple(noise.draw_distinct(distribution, t, 2)) for t in range(samples)]
    for a in range(3):
        for b in range(3):
            if a != b:
                probability = distribution.prob(a) * distribution.without(a).prob(b)
                deviation = (samples * probability * (1 - probability)) ** 0.5
                assert abs(pairs.count((a, b)) - samples * probability) < 6 * deviation
    assert [pair[0] for pair in pairs] == [noise.draw(distribution, t) for t in range(samples)]


def test_shapes_count_their_nodes() -> None:
    assert Widths((4, 2, 2, 1)).num_nodes == 4 + 8 + 16 + 16
    assert Widths((1, 1, 1)).num_nodes == 3
    assert not Widths((1, 1, 1)).branches
    assert Paths([[0, 0], [2]]).num_nodes == 4  # a path brings its beginnings and elder siblings
    assert TreeOptions(tree=(4, 2, 2, 1)).default_num_speculative_tokens() == 44
    nodes = [Node(t, Distribution.one_hot(t), None, (t,), p) for t, p in enumerate((0.1, 0.5, 0.3))]
    assert [n.token for n in Dynamic(2, 9).frontier(nodes)] == [1, 2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tree": "star"}, "tree"),
        ({"tree": []}, "tree"),
        ({"tree": [0]}, "tree"),
        ({"tree": [[]]}, "tree: a path needs at least one rank"),
        ({"tree": [8, 8, 8]}, "tree: the tree has 584 nodes, more than 256"),
        ({"tree": [64] * 64}, "nodes, more than 256"),
        ({"tree": [1] * 300_000}, "tree: a tree has at most 256 nodes, and a path 64 ranks"),
        ({"tree": [[0] * 300_000]}, "tree: a tree has at most 256 nodes, and a path 64 ranks"),
        ({"tree": "dynamic", "expansion": "sample"}, "takes expansion 'top_k', not 'sample'"),
        ({"expansion": "beam"}, "expansion"),
        ({"tree_depth": 3}, "tree_depth is for tree 'dynamic'"),
        ({"tree": [2], "tree_top_k": 3}, "tree_top_k is for tree 'dynamic'"),
        ({"expansion": "top_k", "draft_temperature": 0.5}, "draft_temperature has no effect"),
        ({"tree": "dynamic", "draft_top_k": 5}, "always take the request's own parameters"),
    ],
)
def test_wrong_trees(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TreeOptions(**fields)
    assert message in str(caught.value)


def tree_file(folder: Path, content: str) -> Path:
    """A file with this text after the format, as `tokenleap tree` writes it."""
    path = folder / "tree.json"
    path.write_text(f'{{"format": "tokenleap-tree-1", {content}}}')
    return path


def options_of(tree: Any) -> TreeOptions:
    """Options with a tree as a user may give it."""
    return TreeOptions(tree=tree)


def test_a_tree_from_a_file_is_the_tree_itself(tmp_path: Path) -> None:
    path = tree_file(tmp_path, '"paths": [[0], [1], [0, 0], [0, 1], [1, 0]]')
    inline = TreeOptions(tree=((0,), (1,), (0, 0), (0, 1), (1, 0)))
    for given in (path, str(path)):
        options = options_of(given)
        assert options == inline
        assert options.default_num_speculative_tokens() == 5
    llm = tiny_llm(tiny_model(), "draft_model", gamma=None, tree=str(path))
    path.unlink()  # what has been read is not read again while generating
    (draft,) = drafter_of(llm).propose([request_of()], [Budget(5, 5)])
    assert draft.tree.parents == (-1, 0, 0, 1, 1, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('"paths": []', "is a damaged tree: paths must be a list of lists of ranks"),
        ('"paths": [[]]', "is a damaged tree: paths"),
        ('"paths": [[0, -1]]', "is a damaged tree: paths"),
        ('"paths": [[64]]', "each between 0 and 63"),
        ('"paths": [[true]]', "is a damaged tree: paths"),
        ('"paths": {"0": 1}', "is a damaged tree: paths"),
        ('"size": 3', "is a damaged tree: paths"),
        (f'"paths": [{[0] * 65}]', "the tree is 65 levels deep, more than 64."),
        (f'"paths": [{[63] * 5}]', "the tree has 320 nodes, more than 256."),
        ('"paths": [[0]], "format": "tokenleap-trace-1"', "is not a tree: expected an object with"),
        ('"paths": [[0]', "is not a tree: not JSON in UTF-8"),
    ],
)
def test_wrong_tree_files(tmp_path: Path, content: str, message: str) -> None:
    path = tree_file(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        options_of(str(path))
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_tree_file_that_is_not_there(tmp_path: Path) -> None:
    for given in (tmp_path / "none", str(tmp_path / "none.json"), tmp_path):
        with pytest.raises(ConfigError, match=r"cannot read tree .*: (No such|Is a dir)"):
            options_of(given)
    path = tmp_path / "latin.json"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="not JSON in UTF-8"):
        options_of(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="not JSON in UTF-8"):
        options_of(path)


def test_a_row_that_is_done_keeps_its_cache_while_others_go_on() -> None:
    """The middle row of three drafts one token, its neighbours four: its KV stays right."""
    llm = tiny_llm(tiny_model(), "draft_model")
    drafter = drafter_of(llm)
    assert isinstance(drafter, ModelDrafter)
    scorer = drafter._scorer
    assert isinstance(scorer, OwnModel)
    batch = [
        Request(p, SamplingParams(temperature=0), vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)
        for p in (PROMPTS[0], PROMPTS[2], PROMPTS[4])
    ]
    drafter.propose(batch, [Budget(4, 4), Budget(1, 1), Budget(4, 4)])
    draft_model = scorer._model
    for request in batch:
        (held,) = draft_model.verify([request.key], [chain([5])])
        fresh = Target(tiny_model(seed=1))
        fresh.add(0)
        fresh.prefill(0, request.token_ids)
        assert torch.equal(held.scores[0], fresh.verify([0], [chain([5])])[0].scores[0])


def test_controllers_are_told_how_large_levels_are() -> None:
    """Of a tree without limits, and of one that is cut; None is a chain."""
    for fields in (TREES["widths"], TREES["paths"], {"tree": [3, 4], "gamma": 9}, {"gamma": 4}):
        llm = tiny_llm(tiny_model(), "draft_model", **{"gamma": None, **fields})
        (output,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=9))
        parents = output.trace.steps[0].parents
        depths: list[int] = []
        for parent in parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        sizes = [depths.count(level) for level in range(1, 1 + max(depths))]
        drafter, gamma = drafter_of(llm), llm.speculative_config.gamma
        assert drafter.level_sizes(gamma) == (sizes if drafter.traits.drafts_trees else None)
        assert sum(sizes) == gamma


def test_the_size_of_a_dynamic_tree_is_bounded_by_its_limit() -> None:
    assert Dynamic(top_k=4, depth=3).level_sizes(99) == [4, 16, 16]
    assert Dynamic(top_k=4, depth=3).level_sizes(10) == [4, 5, 1]
    assert Dynamic(top_k=4, depth=3).level_sizes(0) == []


def test_chains_are_as_long_as_the_budget() -> None:
    """The heuristic controller may ask for more than it started with."""
    llm = tiny_llm(tiny_model(), "draft_model", gamma=2)
    (draft,) = drafter_of(llm).propose([request_of()], [Budget(9, 9)])
    assert draft.tree.num_drafted == 9


def test_passes_grow_with_levels_not_with_paths() -> None:
    """One pass of the draft model per level; nodes are computed once."""
    llm = tiny_llm(tiny_model(), "draft_model", gamma=None, tree=[3, 2, 2])
    drafter = drafter_of(llm)
    assert isinstance(drafter, ModelDrafter)
    scorer = drafter._scorer
    assert isinstance(scorer, OwnModel)
    before = scorer._model.num_passes
    drafter.propose([request_of()], [Budget(99, 99)])
    assert scorer._model.num_passes - before == 3
