"""``quartet plan``: what it prints, what its JSON says, and how it refuses."""

import json
import subprocess
import sys

import pytest
import yaml

from quartet_cli.__main__ import main

CUT = ("plan", "partition", "llama-3.1-70b", "--gpus", "1xH100_SXM5,2xL40S_PCIE")
BUY = ("plan", "capacity", "--stock", "H100_SXM5=4,L40S_PCIE=8", "--trace", "azure-conv,rate=20,length=40")


def ran(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ending:
        main(list(arguments))
    return ending.value.code


def test_partition_shows_stages_reasons_choices_and_settings(capsys):
    assert ran(*CUT) == 0
    printed = capsys.readouterr().out
    for part in ("llama-3.1-70b in 3 stages", "What binds", "Other choices", "VLLM_PP_LAYER_PARTITION=", "vllm serve"):
        assert part in printed
    assert "another TP degree per stage" in printed


def test_partition_for_tensorrt_llm_gives_its_file(capsys):
    assert ran(*CUT, "--engine", "tensorrt-llm") == 0
    printed = capsys.readouterr().out
    written = yaml.safe_load(printed.split("<<'END'\n")[1].split("\nEND")[0])
    assert sum(written["pp_partition"]) == 80
    assert "vllm serve" not in printed


def test_partition_answers_in_json_and_goes_on_from_there(tmp_path, capsys):
    assert ran(*CUT, "--precisions", "fp8", "--json") == 0
    now = tmp_path / "now.json"
    now.write_text(capsys.readouterr().out)
    saved = json.loads(now.read_text())
    assert sum(stage["end_layer"] - stage["first_layer"] for stage in saved["placement"]["stages"]) == 80
    assert (
        ran(*CUT, "--from", str(now), "--output", "2048", "--concurrency", "48", "--max-model-len", "16384", "--json")
        == 0
    )
    later = json.loads(capsys.readouterr().out)
    moves = later["moves"]
    assert moves["moves"]
    assert all(peak <= moves["limit_bytes"][gpu] for gpu, peak in moves["peak_bytes"].items())
    assert later["placement"]["rate_per_s"] >= later["current"]["rate_per_s"]
    assert ran(*CUT, "--from", str(now), "--precisions", "fp8") == 0
    assert "Nothing moves." in capsys.readouterr().out


def test_partition_of_what_does_not_fit_says_why_and_fails(capsys):
    assert ran("plan", "partition", "llama-3.1-405b", "--gpus", "2xL40S_PCIE") == 1
    told = capsys.readouterr().err
    assert "llama-3.1-405b does not fit these cards." in told
    assert "are more than the" in told
    assert ran("plan", "partition", "llama-3.1-405b", "--gpus", "2xL40S_PCIE", "--json") == 1
    assert json.loads(capsys.readouterr().out)["placement"] is None


def test_partition_reads_machines_and_models_of_an_operators_own(tmp_path, capsys):
    machines = tmp_path / "nodes.toml"
    machines.write_text('[[nodes]]\nname = "left"\ncards = { MY_CARD = 2 }\nrdma = "ib"\nnic_gb_per_s = 45\n')
    catalogue = tmp_path / "catalogue.toml"
    catalogue.write_text(
        "[hardware.MY_CARD]\nmemory_gb = 64\nmemory_bandwidth_gb_s = 1600\nbf16_tflops = 400\nfp8_tflops = 800\n"
        'host_link = { pcie_gen = 5, gb_per_s = 56 }\ngpu_link = { kind = "pcie", gb_per_s = 50 }\n'
        "tdp_w = 300\nidle_w = 30\nprice_per_hour = 1\n"
        "[models.small]\nlayers = 10\nkv_heads = 8\nhead_dim = 128\nhidden = 4096\nheads = 32\nintermediate = 14336\n"
        "vocab = 32000\nmax_context = 8192\nweight_bytes = { bf16 = 4886000000 }\n"
    )
    command = ("plan", "partition", "small", "--machines", str(machines), "--catalogue", str(catalogue))
    assert ran(*command, "--loss", "fp8=0.2") == 0
    printed = capsys.readouterr().out
    assert "MY_CARD" in printed
    assert "quality lost 0.20 %" in printed
    assert ran(*command, "--json") == 0
    stages = json.loads(capsys.readouterr().out)["placement"]["stages"]
    assert {stage["precision"] for stage in stages} == {"bf16"}, "without a loss given, nothing is quantized"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "partition", "nobody", "--gpus", "1xL40"), "no model nobody in the catalogue; known: "),
        (("plan", "partition", "llama-3.1-8b", "--gpus", "1xTPU"), "no hardware class TPU in the catalogue"),
        (("plan", "partition", "llama-3.1-8b", "--gpus", "L40"), "cannot read 'L40'; it is COUNTxCLASS"),
        ((*CUT, "--precisions", "int3"), "--precisions: no 'int3'; one of bf16, fp8, int4"),
        ((*CUT, "--loss", "fp8"), "--loss 'fp8': it is PRECISION=PCT"),
        ((*CUT, "--loss", "int3=1"), "no precision 'int3' to lose quality by"),
        ((*CUT, "--int4-on", "A100"), "--int4-on: no 'A100' among the cards"),
        ((*CUT, "--max-model-len", "1000000"), "llama-3.1-70b reads at most 131072"),
        ((*CUT, "--prompt", "9000"), "longer than max_model_len 8192"),
        ((*CUT, "--memory-utilisation", "2"), "--memory-utilisation 2 is not from 0.1 to 1"),
        ((*CUT, "--quality-budget", "-1"), "--quality-budget -1 is not from 0 to 100 %"),
        ((*CUT, "--store-gb-per-s", "0"), "--store-gb-per-s 0 is not above 0"),
        ((*CUT, "--from", "/nowhere.json"), "/nowhere.json: "),
        ((*CUT, "--catalogue", "/nowhere.toml"), "--catalogue /nowhere.toml: "),
        (("plan", "partition", "llama-3.1-8b", "--gpus", "1xA100", "--kv-cache", "fp8"), "A100 has no FP8; use bf16"),
        (("plan", "capacity", "--stock", "H100"), "--stock 'H100': it is CLASS=CARDS"),
        (("plan", "capacity", "--stock", "TPU=1"), "no hardware class TPU in the catalogue"),
        ((*BUY, "--trace", "nothing"), "nothing"),
        ((*BUY, "--trace", "mooncake,colour=1"), "cannot read 'colour=1'; allowed: start=NUMBER"),
        ((*BUY, "--slo", "fast"), "--slo fast: is interactive or relaxed, or NAME:TTFT_MS:TPOT_MS"),
        ((*BUY, "--within", "0"), "--within 0 is not above 0 and at most 1"),
        ((*BUY, "--peak", "101"), "--peak 101 is not above 0 and at most 100"),
        ((*BUY, "--window", "0"), "--window 0 is not above 0"),
        ((*BUY, "--budget", "0"), "--budget 0 is not above 0"),
        (
            (*BUY, "--precisions", "fp4"),
            "no card in --stock runs llama-3.1-8b in fp4; times are known for: A100 bf16 tp1",
        ),
        ((*BUY, "--trace", "mooncake,model=llama-3.1-405b"), "llama-3.1-405b"),
    ],
)
def test_what_is_asked_wrongly_is_refused_in_one_line_that_says_what_is_allowed(arguments, message, capsys):
    assert ran(*arguments) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.startswith("quartet: ")
    assert told.count("\n") == 1


def test_a_current_placement_of_another_model_is_refused(tmp_path, capsys):
    assert ran(*CUT, "--json") == 0
    now = tmp_path / "now.json"
    now.write_text(capsys.readouterr().out)
    assert ran("plan", "partition", "llama-3.1-8b", "--gpus", "1xL40S_PCIE", "--from", str(now)) == 2
    assert "a placement of llama-3.1-70b, not of llama-3.1-8b" in capsys.readouterr().err
    assert ran("plan", "partition", "llama-3.1-70b", "--gpus", "8xA100", "--from", str(now)) == 2
    assert "the current placement uses" in capsys.readouterr().err
    now.write_text("{}")
    assert ran(*CUT, "--from", str(now)) == 2
    assert "write it with quartet plan partition" in capsys.readouterr().err


def test_commands_load_without_the_libraries_that_only_planning_needs():
    """An image of the command has neither, and must not notice before a plan is asked for."""
    code = (
        "import sys; sys.modules['numpy'] = sys.modules['scipy'] = None\n"
        "from quartet_cli.__main__ import main; main(['plan', 'accuracy', '--json'])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_accuracy_prints_a_row_for_each_measured_profile(capsys):
    assert ran("plan", "accuracy", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"H100_SXM5", "L40S_PCIE"} <= {row["hardware"] for row in rows}
    assert ran("plan", "accuracy") == 0
    assert "today's kernels" in capsys.readouterr().out


def test_capacity_is_confirmed_by_simulation_and_told_round_by_round(capsys):
    assert ran(*BUY) == 0
    printed = capsys.readouterr()
    for part in ("Rounds", "confirmed by simulation", "What binds", "Next best", "kJ per M"):
        assert part in printed.out
    assert printed.err.startswith("solved: ")
    assert "within SLO" in printed.err


def test_capacity_in_json_is_the_same_every_time(capsys):
    answers = []
    for _ in range(2):
        assert ran(*BUY, "--json", "--runs", "3") == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    found = json.loads(answers[0])
    assert found["confirmed"]
    assert len(found["rounds"]) <= 3
    cards = sum(team["count"] * team["option"]["price_per_hour"] for team in found["mix"]["teams"])
    assert found["mix"]["price_per_hour"] == pytest.approx(cards)


def test_capacity_without_simulations_says_that_it_is_not_confirmed(capsys):
    assert ran(*BUY, "--runs", "0") == 0
    assert "not simulated" in capsys.readouterr().out


def test_capacity_that_no_budget_buys_fails_and_names_the_price(capsys):
    assert ran(*BUY, "--budget", "0.5") == 1
    printed = capsys.readouterr().out
    assert "No mix will do." in printed
    assert "without the budget of $0.5/h: $" in printed
