"""An audit in operation: does the time of an answer tell who sent a prompt before?

    python -m kvpager.server.audit --url http://127.0.0.1:8000 --key MINE --other-key OTHERS [--rounds 60]

In each round somebody sends a prompt of random words, and then the auditor sends it too, and one that
nobody has sent, in random order. The times of the two are compared by a two-sample Kolmogorov-Smirnov test,
as in "Auditing Prompt Caching in Language Model APIs" (ICML 2025). Three cases: the auditor itself sent it
before, which must be seen or the audit says nothing; another tenant did; the auditor did under another
salt. It reports and decides nothing: under load, or with a model that computes a prompt too quickly, more
rounds are needed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

__all__ = ["Case", "Finding", "audit", "kolmogorov_smirnov"]

SEEN_BELOW = 1e-3
"""A difference is called seen if chance alone would show it less often than this."""


@dataclass(frozen=True)
class Case:
    """Who sends a prompt first, and who then measures.

    Attributes:
        name: of the report's row.
        first_key: API key of who sends the prompt first.
        first_salt: its `cache_salt`, or none.
    """

    name: str
    first_key: str
    first_salt: str | None = None


@dataclass(frozen=True)
class Finding:
    """What one case showed.

    Attributes:
        case: its name.
        rounds: prompts of each kind.
        sent_before: median seconds of prompts that were sent before.
        never_sent: median seconds of prompts that were not.
        statistic: largest distance between the two distributions, from 0 to 1.
        p_value: how often chance alone shows such a distance.
    """

    case: str
    rounds: int
    sent_before: float
    never_sent: float
    statistic: float
    p_value: float

    @property
    def is_seen(self) -> bool:
        """Whether the two can be told apart."""
        return self.p_value < SEEN_BELOW


def kolmogorov_smirnov(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Compares two samples: the distance of their distributions, and how often chance shows as much.

    The probability is the asymptotic one with Stephens' correction for finite samples.

    Raises:
        ValueError: a sample is empty.
    """
    if not a or not b:
        raise ValueError(f"samples of {len(a)} and {len(b)} values: both need at least one")
    first, second = sorted(a), sorted(b)
    i = j = 0
    distance = 0.0
    while i < len(first) and j < len(second):
        value = min(first[i], second[j])
        while i < len(first) and first[i] == value:
            i += 1
        while j < len(second) and second[j] == value:
            j += 1
        distance = max(distance, abs(i / len(first) - j / len(second)))
    size = math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    scaled = (size + 0.12 + 0.11 / size) * distance
    if scaled < 0.2:
        # The series does not converge there, and the probability is 1 to more digits than it has.
        return distance, 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2.0 * (k * scaled) ** 2) for k in range(1, 101))
    return distance, min(1.0, max(0.0, 2.0 * sum(terms)))


def audit(
    url: str, key: str, cases: Sequence[Case], *, rounds: int, words: int, seed: int = 0
) -> list[Finding]:
    """Runs the cases against a server that speaks OpenAI's completions.

    Args:
        url: of the server, without a path.
        key: API key of the auditor.
        cases: who sends first.
        rounds: prompts of each kind, at least 1.
        words: length of a prompt; the longer, the more time a hit saves.
        seed: of the prompts and the orders.

    Raises:
        ValueError: a number out of range, or a URL that is not http.
        RuntimeError: the server refused a request.
    """
    if rounds < 1 or words < 1:
        raise ValueError(f"rounds is {rounds} and words {words}: both must be at least 1")
    draw = random.Random(seed)
    server = _Server(url, key)
    return [_run_case(server, key, case, rounds, words, draw) for case in cases]


def _run_case(server: _Server, key: str, case: Case, rounds: int, words: int, draw: random.Random) -> Finding:
    before: list[float] = []
    never: list[float] = []
    for _ in range(rounds):
        known, fresh = _prompt(words, draw), _prompt(words, draw)
        server.seconds(case.first_key, known, case.first_salt)
        turns = [(known, before), (fresh, never)]
        draw.shuffle(turns)
        for prompt, times in turns:
            times.append(server.seconds(key, prompt, None))
    statistic, p_value = kolmogorov_smirnov(before, never)
    return Finding(case.name, rounds, statistics.median(before), statistics.median(never), statistic, p_value)


def _prompt(words: int, draw: random.Random) -> str:
    return " ".join(f"{draw.getrandbits(20):05x}" for _ in range(words))


class _Server:
    """A server that speaks OpenAI's completions."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"the URL is {url!r}: must be http://HOST:PORT")
        self.host, self.port, self.path = parts.hostname, parts.port, parts.path
        models, _ = self._ask("GET", "/v1/models", key, None)
        self.model = json.loads(models)["data"][0]["id"]

    def seconds(self, key: str, prompt: str, salt: str | None) -> float:
        """Sends a prompt for one token and measures until the whole answer is there."""
        body: dict[str, object] = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        if salt is not None:
            body["cache_salt"] = salt
        return self._ask("POST", "/v1/completions", key, json.dumps(body))[1]

    def _ask(self, method: str, path: str, key: str, body: str | None) -> tuple[bytes, float]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        try:
            connection.connect()
            start = time.perf_counter()
            connection.request(method, self.path + path, body, headers)
            response = connection.getresponse()
            answer = response.read()
            seconds = time.perf_counter() - start
        finally:
            connection.close()
        if response.status != 200:
            text = answer[:200].decode(errors="replace")
            raise RuntimeError(f"the server answered {response.status}: {text}")
        return answer, seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Audits a server and prints what was found; 0 whatever that is."""
    parser = argparse.ArgumentParser(
        prog="python -m kvpager.server.audit", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--url", required=True, help="of the server: http://HOST:PORT")
    parser.add_argument("--key", required=True, help="API key of the auditor")
    parser.add_argument("--other-key", required=True, help="API key of another tenant")
    parser.add_argument("--rounds", type=int, default=60, help="prompts of each kind in each case")
    parser.add_argument("--words", type=int, default=200, help="words of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    cases = [
        Case("itself", options.key),
        Case("another tenant", options.other_key),
        Case("itself, another salt", options.key, "salt of the audit"),
    ]
    try:
        findings = audit(
            options.url, options.key, cases, rounds=options.rounds, words=options.words, seed=options.seed
        )
    except (ValueError, RuntimeError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    if options.json:
        print(json.dumps({"findings": [asdict(found) | {"is_seen": found.is_seen} for found in findings]}))
        return 0
    for found in findings:
        print(
            f"sent before by {found.case}: {found.sent_before * 1e3:.1f} ms, never sent "
            f"{found.never_sent * 1e3:.1f} ms, distance {found.statistic:.2f}, p {found.p_value:.2g}: "
            + ("seen" if found.is_seen else "not seen")
        )
    if not findings[0].is_seen:
        print("The control was not seen: more rounds or longer prompts are needed.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
