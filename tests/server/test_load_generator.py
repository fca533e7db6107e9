"""A public load generator (`wrk`) on loopback: every answer is right, and its end leaves nothing behind."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from http_server import ALICE, running_server

from kvpager.engine import NullRunner
from waiting import PATIENCE

SCRIPT = """
wrk.method = "POST"
wrk.headers["Authorization"] = "Bearer {key}"
wrk.headers["Content-Type"] = "application/json"
local places = 0
request = function()
  places = places + 1
  local stream = places % 2 == 0 and "true" or "false"
  local prompt = string.rep("p", places % 200 + 1)
  local head = '{{"model":"null","max_tokens":8,"stream":' .. stream .. ',"prompt":"'
  return wrk.format(nil, nil, nil, head .. prompt .. '"}}')
end
response = function(status, headers, body)
  if status ~= 200 or not (body:find('"length"') ) then
    io.stderr:write("WRONG " .. status .. " " .. body:sub(1, 200) .. "\\n")
  end
end
"""


def generate_load(command: list[str]) -> int:
    """Runs the generator; returns how many answers it got, all of them right."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * PATIENCE, check=True)
    assert "WRONG" not in done.stderr, done.stderr[:500]
    assert "Non-2xx" not in done.stdout, done.stdout
    assert "Socket errors" not in done.stdout, done.stdout
    count = re.search(r"(\d+) requests in", done.stdout)
    assert count is not None
    return int(count[1])


@pytest.mark.parametrize("connections", [4, 64])
def test_load_generator_gets_whole_answers_and_its_end_frees_everything(
    tmp_path: Path, connections: int
) -> None:
    if shutil.which("wrk") is None:
        pytest.skip("no wrk: install the distribution's package to run a public load generator")
    script = tmp_path / "post.lua"
    script.write_text(SCRIPT.format(key=ALICE))
    with running_server(runner=NullRunner(step_time=0.001), num_blocks=1024) as server:
        command = ["wrk", "-t2", f"-c{connections}", "-d3s", f"--timeout={PATIENCE:g}s", "-s", str(script)]
        num_answers, deadline = 0, time.perf_counter() + PATIENCE
        while num_answers <= 2 * connections:
            assert time.perf_counter() < deadline, f"{num_answers} answers"
            num_answers += generate_load([*command, f"{server.url}/v1/completions"])
        server.wait_until_idle()
        assert server.engine.snapshot().tenants["alice"].submitted >= num_answers
