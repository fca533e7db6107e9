"""Beam search: the most likely answers that a search of a given width finds.

A search is `beam_width` sequences of one request. Each step, every beam's next tokens are ranked together,
and the best ones go on: several may go on from one beam, whose blocks they then share, and a beam that nobody
goes on from is dropped. A token that ends an answer makes a hypothesis of it on the way.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpager.engine.generation import TokenLogprobs
from kvpager.engine.sampling import log_softmax, most_likely

if TYPE_CHECKING:
    from kvpager.engine.config import GenerationParams
    from kvpager.engine.generation import Generation

__all__ = ["BeamSearch", "BeamStep", "Hypothesis", "take_beams"]


class _Link(NamedTuple):
    """The last token of a beam, and the beam that it went on from."""

    parent: _Link | None
    token: int
    logprobs: TokenLogprobs


@dataclass(frozen=True)
class Hypothesis:
    """An answer that has ended.

    Attributes:
        score: its log-probability over (number of tokens) ** length_penalty.
        token_ids: with the token that ended it.
        logprobs: one for each token.
        finish_reason: whether a token ended it, or `max_tokens`.
    """

    score: float
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class BeamStep:
    """What one step makes of a search; nothing has changed before it is applied.

    Attributes:
        tokens: [w] of the beams that go on, best first.
        parents: [w] positions of the beams that they go on from.
        scores: [w] their log-probabilities.
        links: [w] their histories.
        ended: hypotheses that end here.
    """

    tokens: list[int]
    parents: list[int]
    scores: npt.NDArray[np.float64]
    links: list[_Link]
    ended: list[Hypothesis]


class BeamSearch:
    """The beams of one request, and the best answers so far.

    Attributes:
        members: [w] the sequences; the first `params.n` of them get the answers.
        is_aborted: whether somebody asked to end it.
        is_done: whether the answers are known.
    """

    def __init__(self, params: GenerationParams, end_tokens: Collection[int]) -> None:
        """Starts with the prompt alone; `members` are set once they have ids.

        Args:
            params: the width, penalties and limits.
            end_tokens: tokens that end an answer.
        """
        assert params.beam_width is not None
        self.members: list[Generation] = []
        self.is_aborted = False
        self.is_done = False
        self._params = params
        self._width = params.beam_width
        self._ends = frozenset(end_tokens)
        self._links: list[_Link | None] = [None]
        self._scores = np.zeros(1)
        self._length = 0
        self._hypotheses: list[Hypothesis] = []

    @property
    def request_id(self) -> int:
        """The scheduler's id of the request."""
        return self.members[0].request_id

    @property
    def num_rows(self) -> int:
        """Sequences whose logits the next step needs: the prompt's, then every beam's."""
        return len(self._links)

    def plan(self, logits: npt.NDArray[np.float32]) -> BeamStep:
        """Ranks the next tokens of all beams.

        Candidates are walked from the most likely on, ties by beam and then by token id, until `beam_width`
        of them go on; an end token met on the way ends a hypothesis.

        Args:
            logits: [`num_rows`, vocab] of the beams in their order, finite.
        """
        scores, beams, tokens, rows = self._candidates(logits)
        step = BeamStep([], [], np.empty(self._width), [], [])
        may_end = self._length + 1 >= self._params.min_tokens
        for place in np.lexsort((tokens, beams, -scores)).tolist():
            token, beam = int(tokens[place]), int(beams[place])
            link = _Link(self._links[beam], token, self._logprobs(rows[beam], token))
            if may_end and token in self._ends:
                step.ended.append(self._hypothesis(link, float(scores[place]), "stop"))
                continue
            step.scores[len(step.tokens)] = scores[place]
            step.tokens.append(token)
            step.parents.append(beam)
            step.links.append(link)
            if len(step.tokens) == self._width:
                break
        return step

    def apply(self, step: BeamStep) -> None:
        """Goes on by a step that was committed."""
        self._links, self._scores = list(step.links), step.scores
        self._length += 1
        ended = step.ended
        if self._length == self._params.max_tokens:
            ended = ended + [
                self._hypothesis(link, float(score), "length")
                for link, score in zip(step.links, step.scores, strict=True)
            ]
        # The sort is stable: of equal scores the one that ended first stays ahead.
        self._hypotheses = sorted([*self._hypotheses, *ended], key=lambda one: -one.score)[: self._width]
        self.is_done = self._length == self._params.max_tokens or self._cannot_improve()

    def answers(self) -> list[Hypothesis]:
        """The best `params.n` answers, best first."""
        return self._hypotheses[: self._params.n]

    def _candidates(
        self, logits: npt.NDArray[np.float32]
    ) -> tuple[
        npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64], list[npt.NDArray[np.float64]]
    ]:
        """Log-probability, beam and token of all that can be among the best, and the distributions.

        So many of each beam's best tokens suffice that `beam_width` of them do not end it.
        """
        count = min(self._width + len(self._ends), logits.shape[1])
        rows = [log_softmax(row) for row in logits]
        best = [most_likely(row, count) for row in rows]
        scores = [score + row[ids] for score, row, ids in zip(self._scores, rows, best, strict=True)]
        beams = np.repeat(np.arange(len(rows)), count)
        return np.concatenate(scores), beams, np.concatenate(best), rows

    def _logprobs(self, row: npt.NDArray[np.float64], token: int) -> TokenLogprobs:
        num_top = self._params.logprobs or 0
        top = most_likely(row, min(num_top, len(row))) if num_top else ()
        return TokenLogprobs(float(row[token]), tuple((int(each), float(row[each])) for each in top))

    def _hypothesis(self, link: _Link, score: float, reason: Literal["stop", "length"]) -> Hypothesis:
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        each: _Link | None = link
        while each is not None:
            token_ids.append(each.token)
            logprobs.append(each.logprobs)
            each = each.parent
        score /= len(token_ids) ** self._params.length_penalty
        return Hypothesis(score, token_ids[::-1], logprobs[::-1], reason)

    def _cannot_improve(self) -> bool:
        """Whether no beam can get ahead of the worst hypothesis that is kept."""
        if len(self._hypotheses) < self._width:
            return False
        if self._params.early_stopping:
            return True
        # A log-probability only falls; what it is divided by grows with the length, or shrinks.
        penalty = self._params.length_penalty
        length = self._params.max_tokens if penalty > 0 else self._length + 1
        return bool(self._scores.max() / length**penalty <= self._hypotheses[-1].score)


def take_beams(sampled: list[Generation]) -> dict[BeamSearch, list[int]]:
    """Rows of each search among the sampled ones, in the order of its beams.

    The last row of a prompt is sampled once for each beam: those places of `sampled` become the beams'.
    """
    rows_of: dict[BeamSearch, list[int]] = {}
    for row, generation in enumerate(sampled):
        if (search := generation.search) is not None:
            rows = rows_of.setdefault(search, [])
            if search.num_rows == 1:
                sampled[row] = search.members[len(rows)]
            rows.append(row)
    for rows in rows_of.values():
        rows.sort(key=lambda row: sampled[row].index)
    return rows_of
