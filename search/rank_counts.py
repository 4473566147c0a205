"""How often a rank of a head, and a path of ranks, is right, and what a tree node is worth by these counts.

Head d (d = 1 ... K) guesses the token d places behind the root. The `rank` of the true token among a head's guesses is
0 when the likeliest guess is right; `max_rank` when none of the first `max_rank` is. A path (i1, ..., id) is accepted
exactly when head 1's rank-i1 guess, head 2's rank-i2 guess and so on are all right, so paths are counted as wholes:
multiplying the heads' own rates, as the Medusa paper's search does, takes the heads for independent, and they are not
(easy places are easy for all of them).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from lasd.errors import LasdError

RankPath = tuple[int, ...]
Run = list[list[int]]
"""Places in a row: for each, the ranks of the true tokens in head 1, head 2, ... as far as they could be judged."""

PRIOR_WEIGHT = 16.0
"""A path's own rate and the head's overall rate weigh the same when the path's parent was seen this often."""


class RankCounts:
    """Counts of true ranks by head and by path.

    Args:
        num_heads: K.
        max_rank: ranks that are counted for each head, 0 to `max_rank - 1`.

    Attributes:
        hits: [K][max_rank]; how often each rank of each head was right.
        trials: [K]; places at which each head could be judged. Deeper heads have fewer: an answer ends before their
            token.
        paths: path -> [how often all its ranks were right, at how many of those places the next head could be judged].
    """

    def __init__(self, num_heads: int, max_rank: int):
        if num_heads < 1 or max_rank < 1:
            raise LasdError(f"rank counts got {num_heads} heads and {max_rank} ranks; both must be at least 1")
        self.num_heads, self.max_rank = num_heads, max_rank
        self.hits = [[0] * max_rank for _ in range(num_heads)]
        self.trials = [0] * num_heads
        self.paths: dict[RankPath, list[int]] = {(): [0, 0]}

    def add(self, places: Iterable[Sequence[int]]) -> None:
        """Counts places of an answer.

        Args:
            places: for each place the true token's rank in head 1, head 2, ...; as many as could be judged there (at
                most K).
        """
        for ranks in places:
            self.paths[()][0] += 1
            self.paths[()][1] += bool(ranks)
            on_path = True
            for head, rank in enumerate(ranks):
                self.trials[head] += 1
                on_path = on_path and rank < self.max_rank
                if rank < self.max_rank:
                    self.hits[head][rank] += 1
                if on_path:
                    counts = self.paths.setdefault(tuple(ranks[: head + 1]), [0, 0])
                    counts[0] += 1
                    counts[1] += head + 1 < len(ranks)

    def rate(self, head: int, rank: int) -> float:
        """Share of places at which this rank of head `head` (from 0) was right; 0 where nothing was counted."""
        return self.hits[head][rank] / self.trials[head] if self.trials[head] else 0.0

    def top(self, num_ranks: int) -> list[float]:
        """For each head, the share of places at which one of its first `num_ranks` guesses was right."""
        return [
            sum(self.rate(head, rank) for rank in range(min(num_ranks, self.max_rank)))
            for head in range(self.num_heads)
        ]

    def values(self) -> "PathValues":
        """What each path is worth by these counts."""
        return PathValues(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back."""
        paths = {",".join(map(str, path)): counts for path, counts in sorted(self.paths.items())}
        return {
            "num_heads": self.num_heads,
            "max_rank": self.max_rank,
            "trials": self.trials,
            "hits": self.hits,
            "paths": paths,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RankCounts":
        """Reads what `to_dict` made."""
        counts = cls(data["num_heads"], data["max_rank"])
        counts.trials = [int(n) for n in data["trials"]]
        counts.hits = [[int(n) for n in row] for row in data["hits"]]
        counts.paths = {tuple(int(r) for r in key.split(",") if r): list(value) for key, value in data["paths"].items()}
        return counts


class PathValues:
    """Path -> probability that a step accepts the whole path.

    Each rank of a path adds the factor (times seen + w x head's own rate) / (times its parent could be continued +
    w), with w = PRIOR_WEIGHT: the measured rate on a path that was seen often, the product of the heads' own rates on
    one that was not.
    """

    def __init__(self, counts: RankCounts):
        self._counts = counts
        self._known: dict[RankPath, float] = {(): 1.0}

    def __call__(self, path: RankPath) -> float:
        """Probability of `path`, from 0 to 1; never above its parent's."""
        if path not in self._known:
            self._known[path] = self(path[:-1]) * self._factor(path)
        return self._known[path]

    def _factor(self, path: RankPath) -> float:
        counts = self._counts
        seen = counts.paths.get(path, (0, 0))[0]
        continued = counts.paths.get(path[:-1], (0, 0))[1]
        return (seen + PRIOR_WEIGHT * counts.rate(len(path) - 1, path[-1])) / (continued + PRIOR_WEIGHT)


class IndependentValues:
    """Path -> product of the heads' own rates: the Medusa paper's value of a node (Cai et al. 2024, section 2.3.3)."""

    def __init__(self, counts: RankCounts):
        self._counts = counts

    def __call__(self, path: RankPath) -> float:
        """Probability of `path` if the heads were right or wrong independently of each other."""
        value = 1.0
        for head, rank in enumerate(path):
            value *= self._counts.rate(head, rank)
        return value


def answer_runs(judged: Sequence[bool], ranks: Sequence[Sequence[int]]) -> list[Run]:
    """The places of one text at which heads can be judged, in runs without a gap.

    At position t the root is token t + 1 and head d guesses token t + 1 + d. A place counts while the text goes on as
    the model's own answer: every token from t + 1 to t + 1 + d must be `judged`.

    Args:
        judged: for each token whether it stands in an answer and is the model's own choice.
        ranks: for each position t the rank of the true token in head 1 ... K's guesses (what stands behind the text's
            end is ignored).

    Returns:
        For each run of judged tokens its places, one a root: the ranks of the heads that can be judged there (none at
            the last).
    """
    runs: list[Run] = []
    run: Run = []
    for position in range(len(judged) - 2, -1, -1):
        if judged[position + 1]:
            run.append(list(ranks[position][: len(run)]))
        elif run:
            runs.append(run[::-1])
            run = []
    if run:
        runs.append(run[::-1])
    return runs[::-1]
