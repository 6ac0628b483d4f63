"""``quartet simulate`` on the command line: what it prints and writes, and how it says what cannot be."""

import json
import re

import pytest

from quartet_cli.__main__ import main

QUICK = ["simulate", "--trace", "azure-conv,length=40,rate=20", "--seeds", "0", "--jobs", "1"]


def run(capsys, *arguments):
    """(exit code, standard output, standard error)."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def test_policies_are_shown_beside_each_other(capsys):
    code, out, err = run(capsys, *QUICK, "--policy", "finish-time,round-robin")
    assert code == 0
    assert err == ""
    assert re.search(r"finish-time +\d", out)
    assert re.search(r"round-robin +\d", out)
    for word in ("within SLO %", "goodput", "$/M", "kJ/M", "H100_SXM5", "L40S_PCIE", "interactive", "under 1k"):
        assert word in out


def test_json_goes_to_standard_output_alone_and_is_the_same_again(capsys):
    arguments = [*QUICK, "--policy", "finish-time", "--json", "-", "--seeds", "3"]
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    (outcome,) = json.loads(out)["outcomes"]
    assert (outcome["policy"], outcome["seed"], outcome["finished"]) == ("finish-time", 3, outcome["requests"])
    assert {c["hardware"] for c in outcome["classes"]} == {"H100_SXM5", "L40S_PCIE"}
    assert run(capsys, *arguments)[1] == out


def test_the_report_is_one_page_that_loads_nothing(capsys, tmp_path):
    path = tmp_path / "report.html"
    code, _, _ = run(capsys, *QUICK, "--policy", "finish-time,least-loaded", "--html", str(path))
    assert code == 0
    page = path.read_text()
    assert page.count("<svg") == 10
    assert "finish-time" in page
    assert "<script" not in page
    assert not re.search(r"(src|href)=|url\(|@import", page)


def test_knees_have_a_rate_for_each_share(capsys):
    code, out, _ = run(
        capsys, "simulate", "--trace", "azure-conv,length=30,rate=60", "--seeds", "0", "--jobs", "1",
        "--policy", "least-loaded", "--knee", "90,97", "--fleet", "1xL40S_PCIE:llama-3.1-8b", "--json", "-",
    )  # fmt: skip
    assert code == 0
    ((ninety, strict),) = json.loads(out)["knees"]["least-loaded"]
    assert (ninety["share"], strict["share"]) == (0.9, 0.97)
    assert ninety["rate_per_s"] >= strict["rate_per_s"] > 0
    assert ninety["outcome"]["within_slo"] >= 0.9


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "wishful"], "finish-time, decision-matrix"),
        (["--fleet", "2xFOO:llama-3.1-8b"], "no hardware class FOO; known: A100"),
        (["--fleet", "many"], "COUNT"),
        (["--trace", "sahara"], "there are: azure-conv"),
        (["--trace", "mooncake:/nowhere"], "/nowhere: No such file"),
        (["--trace", "mooncake,color=red"], "start=NUMBER"),
        (["--trace", "mooncake,model=gpt-9"], "serves llama-3.1-8b"),
        (["--slo", "quick"], "NAME:TTFT_MS:TPOT_MS"),
        (["--slo", "quick:0:5"], "above 0"),
        (["--set", "hold_ms=3"], "hold_max_ms"),
        (["--set", "hold_max_ms=soon"], "hold_max_ms"),
        (["--fail", "3"], "WORKER@AT_S+FOR_S"),
        (["--seeds", "one"], "whole numbers"),
        (["--knee", "200"], "up to 100"),
        (["--json", "/nowhere/x.json"], "no such directory"),
        (["--study", "philosophy"], "no such study"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(capsys, arguments, says):
    code, out, err = run(capsys, *QUICK, *arguments)
    assert code == 2
    assert out == ""
    assert says in err
    assert err.startswith("quartet: ")
    assert err.count("\n") == 1


def test_validation_prints_errors_against_measured_rows(capsys):
    code, out, _ = run(capsys, "simulate", "--validate")
    assert code == 0
    assert "H100_SXM5/llama-3.1-70b/fp8/tp4" in out
    assert re.search(r"^all +61", out, re.MULTILINE)
