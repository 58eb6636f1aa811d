"""The files in deploy/ name metrics, options and variables that exist."""

from __future__ import annotations

import json
import re
import shlex

from typer.testing import CliRunner

from tests.serve.support import Served, until
from tests.test_docs import ROOT
from tokenleap.cli import app

DASHBOARD = json.loads((ROOT / "deploy/grafana.json").read_text())
METRIC = re.compile(r"\b(?:vllm|tokenleap):[a-z0-9_]+")


def metrics(server: Served) -> set[str]:
    lines = server.http.get("/metrics").text.splitlines()
    return {line.split("{")[0] for line in lines if METRIC.match(line)}


def test_each_metric_of_the_dashboard_exists(server: Served) -> None:
    # One token, again and again, so drafts are accepted on every processor.
    (letter,) = server.llm.encode("a")
    server.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "aaaa"}],
        temperature=0,
        max_tokens=20,
        logit_bias={str(letter): 100},
        speculative_config={"method": "ngram", "controller": "fixed"},
    ).raise_for_status()
    until(lambda: "vllm:spec_decode_num_accepted_tokens_per_pos_total" in metrics(server))
    known = metrics(server)
    expressions = [each["expr"] for panel in DASHBOARD["panels"] for each in panel["targets"]]
    expressions += [each["query"] for each in DASHBOARD["templating"]["list"]]
    asked = {name for text in expressions for name in METRIC.findall(text)}
    assert len(asked) > 15
    assert asked <= known
    for text in expressions:
        assert text.count("(") == text.count(")")
        assert text.count("{") == text.count("}")


def test_panels_do_not_overlap() -> None:
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def test_commands_of_the_files_have_options_that_exist() -> None:
    text = CliRunner().invoke(app, ["serve", "--help-all"], env={"COLUMNS": "200"}).output
    unit = (ROOT / "deploy/tokenleap.service").read_text()
    image = (ROOT / "docker/Dockerfile").read_text()
    for file in (unit, image, (ROOT / "deploy/nginx.conf").read_text()):
        for option in re.findall(r"(?<=[\s\"])--(?:host|port|quiet|max|shutdown)[a-z-]*", file):
            assert option in text, option
    (started,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert shlex.split(started)[1] == "serve"
    timeout = int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0])
    assert timeout > 30  # the default of --shutdown-timeout
