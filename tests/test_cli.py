"""The command line: results, exit codes, one line per mistake, JSON, golden output, identical bytes."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from parallegg import cli, planfile
from parallegg.cli import main
from parallegg.extract import hardware
from parallegg.options import parse_shapes
from parallegg.program import UserError
from parallegg.runtime.devices import ensure_devices
from parallegg.units import parse_bytes
from parallegg.verification.layers import Verification
from parallegg.verification.numbers import Comparison
from parallegg.verification.plans import PlanFinding

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
UPDATE = "PARALLEGG_UPDATE_GOLDEN" in os.environ  # writes the golden files anew

_spec = importlib.util.spec_from_file_location("cli_models", HERE / "cli_models.py")
assert _spec and _spec.loader
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

BAD_RULES = """; Comment.
(rewrite (At ax (Shard 0) (Unary f x)) (Unary f x)
         :ruleset parallel :name "wrong")
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Path:
    """A folder with a model and its plan on data=2,model=2."""
    ensure_devices(8)  # once JAX runs, their number stays
    folder = tmp_path_factory.mktemp("planned")
    model = models.mlp(folder / "mlp.onnx")
    plan = folder / "mlp.plan.onnx"
    assert main(["plan", str(model), "--mesh", "data=2,model=2", "-o", str(plan)]) == cli.GOOD
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------------------------------------ results


def test_plan_writes_beside_by_default_and_says_what_next(folder, capsys):
    models.mlp(folder / "mlp.onnx")
    assert main(["plan", "mlp.onnx", "--mesh", "data=2"]) == 0
    out = capsys.readouterr().out
    assert (folder / "mlp.plan.onnx").is_file()
    assert "parallegg verify mlp.onnx mlp.plan.onnx" in out
    assert all(
        word in out for word in ("data=2 (2 devices)", "proved bound", "gap", "e-nodes", "of 2 GB a device")
    )


def test_plan_json_is_one_document_with_the_published_fields(folder, capsys):
    models.mlp(folder / "mlp.onnx")
    assert main(["plan", "mlp.onnx", "--mesh", "data=2,odd=7", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out, parse_constant=lambda text: pytest.fail(text))
    fields = "cost_s bound_s gap saturated stopped_by search_s memory_bytes enodes eclasses collectives plan warnings"
    assert set(fields.split()) <= set(report)
    assert all(
        set(row) == {"kind", "axis", "count", "bytes", "payload_bytes"} for row in report["collectives"]
    )
    assert 0 < report["bound_s"] <= report["cost_s"]
    assert report["warnings"] and f"warning: {report['warnings'][0]}" in err
    assert "'odd'" in report["warnings"][0]


def test_shape_hardware_and_pin_reach_the_plan(folder, capsys):
    models.mlp(folder / "mlp.onnx", batch="N")
    argv = [
        "plan",
        "mlp.onnx",
        "--mesh",
        "data=2",
        "--shape",
        "x=6x256",
        "--hardware",
        "h100",
        "--pin",
        "y=S0",
    ]
    assert main(argv) == 0
    loaded = planfile.load("mlp.plan.onnx")
    assert loaded.inputs[0].type.shape == (6, 256)
    assert loaded.metadata["hardware"] == "h100"
    assert str(loaded.outputs[0].layout[0]) == "S0"


def test_breakdown_adds_up_to_the_cost(planned, capsys):
    assert main(["show", str(planned / "mlp.plan.onnx"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    parts = facts["breakdown"]
    assert parts["compute_s"] + sum(parts["collectives_s"].values()) == pytest.approx(
        facts["cost_s"], rel=1e-6
    )


def test_show_truncates_long_tables_unless_asked(folder, capsys):
    assert main(["plan", "onnx:light_squeezenet", "--mesh", "data=2", "-o", "a.plan.onnx"]) == 0
    capsys.readouterr()
    assert main(["show", "a.plan.onnx"]) == 0
    short = capsys.readouterr().out
    assert main(["show", "a.plan.onnx", "--all"]) == 0
    full = capsys.readouterr().out
    assert "more (--all)" in short and "conv10_w_0" not in short
    assert "more (--all)" not in full and "conv10_w_0" in full


def test_run_and_verify(planned, folder, capsys):
    model, plan = str(planned / "mlp.onnx"), str(planned / "mlp.plan.onnx")
    x = np.random.default_rng(1).standard_normal((64, 256), np.float32)
    np.savez("in.npz", x=x)
    assert main(["run", plan, "--model", model, "--inputs", "in.npz", "-o", "out.npz"]) == 0
    out, err = capsys.readouterr()
    assert "virtual CPU devices" in err and "y" in out
    assert np.load("out.npz")["y"] == pytest.approx(models.mlp_result(x), rel=1e-4)
    assert main(["run", plan, "--model", model, "--random"]) == 0
    capsys.readouterr()
    assert main(["verify", model, plan, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["verdict"] == "tested" and found["first_divergence"] is None and found["tensors_checked"] >= 1
    )


EDITED = {  # what somebody may do to a plan's program or report who signs it again
    "an operator that nobody has": lambda plan: _with_node(plan, op="Frobnicate"),
    "a collective without attributes": lambda plan: _with_node(plan, op="AllReduce", domain="parallegg"),
    "a dimension that is not there": lambda plan: _with_node(
        plan, op="AllGather", domain="parallegg", attributes={"axis": "data", "dim": 9}
    ),
    "a report without sense": lambda plan: replace(plan, metadata={**plan.metadata, "cost_s": "much"}),
    "a cost below zero": lambda plan: replace(plan, metadata={**plan.metadata, "cost_s": -1.0}),
}


def _with_node(plan, **changes):
    return replace(plan, nodes=(*plan.nodes[:1], replace(plan.nodes[1], **changes), *plan.nodes[2:]))


@pytest.mark.parametrize("edit", EDITED)
def test_an_edited_plan_is_named_in_one_line(edit, planned, folder, capsys):
    model = str(planned / "mlp.onnx")
    planfile.save(EDITED[edit](planfile.load(planned / "mlp.plan.onnx")), "edited.plan.onnx")
    for command in (["show", "edited.plan.onnx"], ["run", "edited.plan.onnx", "--model", model, "--random"]):
        code = main(command)
        if command[0] == "run" or code:
            assert code == cli.BAD_INPUT
            _one_line(capsys, [])
        capsys.readouterr()
    assert main(["verify", model, "edited.plan.onnx"]) in (cli.BAD_INPUT, cli.REFUTED)


@pytest.mark.parametrize("text", ["[]", "null", '{"cost_s": 1e999}', '{"gap": -1}', '{"bound_s": "none"}'])
def test_a_report_is_an_object_with_figures(text):
    with pytest.raises(ValueError, match="report"):
        planfile._report(text)


def test_verify_refutes_a_plan_that_computes_something_else(planned, folder, capsys):
    """The plan's metadata and shapes fit the model; one operator does not."""
    loaded = planfile.load(planned / "mlp.plan.onnx")
    wrong = tuple(replace(n, op="Abs") if n.op == "Relu" else n for n in loaded.nodes)
    planfile.save(replace(loaded, nodes=wrong), "wrong.plan.onnx")
    assert main(["verify", str(planned / "mlp.onnx"), "wrong.plan.onnx"]) == cli.REFUTED
    out = capsys.readouterr().out
    assert out.startswith("refuted") and "first tensor that differs: r@" in out


@pytest.mark.parametrize(("verdict", "code"), [("proved", 0), ("tested", 0), ("refuted", 1), ("unknown", 4)])
def test_verdicts_have_exit_codes(verdict, code, planned, monkeypatch, capsys):
    derived, compared = PlanFinding("derived", "by rules"), Comparison("tested", "by numbers", 3, None, 7)
    found = Verification(verdict, "for a reason", derived, compared)
    monkeypatch.setattr(cli, "verify_plan", lambda *_, **__: found)
    argv = ["verify", str(planned / "mlp.onnx"), str(planned / "mlp.plan.onnx")]
    assert main(argv) == code
    assert capsys.readouterr().out.startswith(f"{verdict}: for a reason")


def test_hardware_auto_asks_the_devices(folder, capsys):
    models.mlp(folder / "mlp.onnx")
    assert main(["plan", "mlp.onnx", "--mesh", "data=2", "--hardware", "auto", "--json"]) == 0
    out, err = capsys.readouterr()
    assert f"hardware: {json.loads(out)['hardware']}\n" in err


def test_models_can_be_named(capsys):
    assert main(["models", "--json"]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["onnx:light_resnet50"]["inputs"] == {"gpu_0/data_0": "1x3x224x224"}
    assert main(["models"]) == 0
    assert "onnx:light_resnet50" in capsys.readouterr().out


def test_rules_list(capsys):
    assert main(["rules", "list", "--json"]) == 0
    found = {rule["name"]: rule for rule in json.loads(capsys.readouterr().out)}
    assert found["matmul-inner"]["ruleset"] == "parallel"
    assert found["matmul-inner"]["place"].startswith("rules/matmul.egg:")


def test_internal_errors_say_how_to_report_them(planned, monkeypatch, capsys):
    def fail(*_):
        raise ZeroDivisionError("something of ours")

    monkeypatch.setattr(cli, "describe", fail)
    assert main(["show", str(planned / "mlp.plan.onnx")]) == cli.INTERNAL
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "something of ours" in err and "report it" in err
    written = Path(err.partition("The traceback is in ")[2].partition(";")[0])
    assert "ZeroDivisionError" in written.read_text()
    written.unlink()
    assert main(["--debug", "show", str(planned / "mlp.plan.onnx")]) == cli.INTERNAL
    assert "Traceback" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ golden


def test_show_prints_what_it_printed(planned, monkeypatch, capsys):
    """Both forms, and the digest of the program: none depends on time, folder or machine."""
    monkeypatch.chdir(planned)
    assert main(["show", "mlp.plan.onnx", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out, parse_float=lambda text: float(f"{float(text):.9g}"))
    _golden("show.json", json.dumps(facts, indent=2) + "\n")
    assert main(["show", "mlp.plan.onnx"]) == 0
    _golden("show.txt", capsys.readouterr().out)
    program = replace(planfile.load("mlp.plan.onnx"), metadata={})  # it has the digest of all rule files
    _golden("program.sha256", hashlib.sha256(planfile.to_bytes(program)).hexdigest() + "\n")


def _golden(name: str, found: str) -> None:
    path = GOLDEN / name
    if UPDATE:
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8"), (
        f"{path.name}: set PARALLEGG_UPDATE_GOLDEN=1 if this is meant"
    )


def test_plan_files_do_not_depend_on_the_hash_seed(planned, folder):
    for seed in ("0", "1"):
        command = [
            sys.executable,
            "-m",
            "parallegg",
            "plan",
            str(planned / "mlp.onnx"),
            "--mesh",
            "data=2,model=2",
        ]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [*command, "-o", f"{seed}.onnx"], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    first, second = Path("0.onnx").read_bytes(), Path("1.onnx").read_bytes()
    assert first == second == (planned / "mlp.plan.onnx").read_bytes()


# ------------------------------------------------------------------------------------------------ bad input


def _text(folder: Path) -> str:
    (folder / "bad.onnx").write_text("this is not a model\n")
    return "bad.onnx"


def _truncated(folder: Path) -> str:
    data = models.mlp(folder / "bad.onnx").read_bytes()
    (folder / "bad.onnx").write_bytes(data[: len(data) // 2])
    return "bad.onnx"


def _model(make, **options):
    return lambda folder: make(folder / "bad.onnx", **options).name


good, open_batch = _model(models.mlp), _model(models.mlp, batch="N")
MESH = ("--mesh", "data=2")
PLANNING = {
    "no such file": (lambda folder: "missing.onnx", MESH, ["missing.onnx", "No such file"]),
    "a folder": (lambda folder: ".", MESH, ["cannot be read"]),
    "not an ONNX file": (_text, MESH, ["bad.onnx", "not an ONNX"]),
    "truncated file": (_truncated, MESH, ["bad.onnx", "truncated"]),
    "unknown operator": (_model(models.unknown_operator), MESH, ["bad.onnx", "'frob'", "Frobnicate"]),
    "data-dependent shape": (_model(models.data_dependent), MESH, ["bad.onnx", "'where'", "NonZero"]),
    "open dimension": (open_batch, MESH, ["bad.onnx", "'N'", "--shape x="]),
    "unknown input": (good, (*MESH, "--shape", "q=1x2"), ["q=", "no such input", "x"]),
    "wrong rank": (good, (*MESH, "--shape", "x=64x256x1"), ["--shape x=64x256x1", "2 dimensions"]),
    "shape is no shape": (good, (*MESH, "--shape", "x=8,256"), ["--shape 'x=8,256'", "expected"]),
    "zero size": (good, (*MESH, "--shape", "x=0x256"), ["--shape 'x=0x256'", "positive"]),
    "negative size": (good, (*MESH, "--shape", "x=-1x256"), ["--shape 'x=-1x256'", "positive"]),
    "shape given twice": (good, (*MESH, "--shape", "x=8x256", "--shape", "x=4x256"), ["already"]),
    "malformed mesh": (good, ("--mesh", "2x4"), ["'2x4'", "data=2,model=4"]),
    "empty mesh": (good, ("--mesh", ""), ["mesh ''", "expected"]),
    "zero axis": (good, ("--mesh", "data=0"), ["'data'", "not positive"]),
    "negative axis": (good, ("--mesh", "data=-2"), ["'data'", "not positive"]),
    "more devices than there are": (good, ("--mesh", f"data={10**20}"), ["are more than"]),
    "axis twice": (good, ("--mesh", "data=2,data=2"), ["data=2,data=2", "twice"]),
    "no mesh": (good, (), ["--mesh"]),
    "unknown option": (good, (*MESH, "--fast"), ["--fast"]),
    "unknown hardware": (good, (*MESH, "--hardware", "abacus"), ["'abacus'", "h100"]),
    "memory is no size": (good, (*MESH, "--memory", "lots"), ["--memory 'lots'", "80GB"]),
    "no memory": (good, (*MESH, "--memory", "0GB"), ["--memory '0GB'", "positive"]),
    "pin is no placement": (good, (*MESH, "--pin", "y=X"), ["--pin 'y=X'", "S0"]),
    "pin for another mesh": (good, (*MESH, "--pin", "y=S0,R"), ["--pin 'y=S0,R'", "1 placements"]),
    "pin of no tensor": (good, (*MESH, "--pin", "nothing=S0"), ["--pin nothing=S0", "x, a, b, y"]),
    "pin that does not divide": (
        good,
        ("--mesh", "odd=7", "--pin", "y=S0"),
        ["--pin y=S0", "7 does not divide 64"],
    ),
    "missing rule file": (good, (*MESH, "--rules", "no.egg"), ["no.egg", "No such file"]),
    "wrong rule": (good, (*MESH, "--rules", "bad.egg"), ["bad.egg:2:1", "'x'", "(rewrite (At ax (Shard 0)"]),
    "unbalanced rule": (good, (*MESH, "--rules", "open.egg"), ["open.egg:1:"]),
    "rule file that prints": (good, (*MESH, "--rules", "print.egg"), ["print.egg:2:1", "print-size"]),
    "output without folder": (good, (*MESH, "-o", "no/plan.onnx"), ["no/plan.onnx", "cannot be written"]),
    "output is no file": (good, (*MESH, "-o", "pipe"), ["pipe", "cannot be written", "no file"]),
    "output's name is too long": (good, (*MESH, "-o", "x" * 300), ["File name too long"]),
    "model is a device": (lambda folder: "/dev/zero", MESH, ["/dev/zero", "a device"]),
    "pinned twice": (good, (*MESH, "--pin", "y=S0", "--pin", "y=R"), ["--pin 'y=R'", "already"]),
    "profile without float32": (
        good,
        (*MESH, "--hardware", "bare.toml"),
        ["bare.toml", "'float32' is missing"],
    ),
    "profile with a negative time": (good, (*MESH, "--hardware", "past.toml"), ["past.toml", "-1"]),
    "profile with no bounds": (good, (*MESH, "--hardware", "inf.toml"), ["inf.toml", "inf"]),
    "output is a folder": (good, (*MESH, "-o", "."), ["cannot be written", "folder"]),
    "unwritable output": (good, (*MESH, "-o", "/proc/plan.onnx"), ["/proc/plan.onnx", "cannot be written"]),
    "output is the model": (good, (*MESH, "-o", "bad.onnx"), ["bad.onnx", "the model itself"]),
    "unknown sample": (lambda folder: "onnx:gpt7", MESH, ["'onnx:gpt7'", "light_resnet50"]),
}


PROFILES = [  # file, what is replaced in the shipped profile, by what
    ("bare.toml", r"\bfloat32\b", "float33"),
    ("past.toml", r"^launch_seconds *= *\S+", "launch_seconds = -1"),
    ("inf.toml", r"^bytes *= *\S+", "bytes = inf"),
]


@pytest.mark.parametrize("case", PLANNING)
def test_planning_refuses(case, folder, capsys):
    make, options, expected = PLANNING[case]
    model = make(folder)
    (folder / "bad.egg").write_text(BAD_RULES)
    (folder / "open.egg").write_text('(rewrite (At ax (Shard 0) (Unary f x)) :name "open"\n')
    (folder / "print.egg").write_text("; Two lines.\n(print-size)\n")
    for name, old, new in PROFILES:
        text = (Path(hardware.__file__).parent / "profiles" / "cpu.toml").read_text(encoding="utf-8")
        assert re.search(old, text, re.M)
        (folder / name).write_text(re.sub(old, new, text, flags=re.M), encoding="utf-8")
    os.mkfifo(folder / "pipe")
    before = sorted(folder.iterdir()), _contents(folder)
    assert main(["plan", model, *options]) == cli.BAD_INPUT
    _one_line(capsys, expected)
    assert (sorted(folder.iterdir()), _contents(folder)) == before


def _contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()]


def _one_line(capsys, expected: list[str]) -> None:
    out, err = capsys.readouterr()
    lines = [
        line for line in err.splitlines() if not re.match(r"devices: | *\d+ s  ", line)
    ]  # what it is doing
    assert out == "" and len(lines) == 1 and lines[0].startswith("error: "), (out, err)
    missing = [text for text in expected if text not in lines[0]]
    assert not missing, (missing, lines[0])


def _flipped(planned: Path) -> str:
    data = bytearray((planned / "mlp.plan.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    Path("bad.plan.onnx").write_bytes(data)
    return "bad.plan.onnx"


def _shortened(planned: Path) -> str:
    Path("bad.plan.onnx").write_bytes((planned / "mlp.plan.onnx").read_bytes()[:-20])
    return "bad.plan.onnx"


def _the_model(planned: Path) -> str:
    return str(planned / "mlp.onnx")


def _the_plan(planned: Path) -> str:
    return str(planned / "mlp.plan.onnx")


def _another(planned: Path) -> str:
    return str(models.mlp(Path("other.onnx"), hidden=128))


def _reordered(planned: Path) -> str:
    """Same tensors, another operator."""
    import onnx

    model = onnx.load(planned / "mlp.onnx")
    model.graph.node[1].op_type = "Sigmoid"
    onnx.save(model, "other.onnx")
    return "other.onnx"


def _without_weights(planned: Path) -> str:
    return str(models.external_weights(Path("mlp.onnx").resolve()))


def _arrays(**arrays):
    def make() -> list[str]:
        np.savez("in.npz", **arrays)
        return ["--inputs", "in.npz"]

    return make


def _no_archive() -> list[str]:
    Path("in.npz").write_text("no archive")
    return ["--inputs", "in.npz"]


X = np.zeros((64, 256), np.float32)
fed = _arrays(x=X)
RUNNING = {
    "no such plan": (lambda p: "no.plan.onnx", _the_model, fed, ["no.plan.onnx", "No such file"]),
    "flipped byte": (_flipped, _the_model, fed, ["bad.plan.onnx"]),
    "shortened plan": (_shortened, _the_model, fed, ["bad.plan.onnx"]),
    "a model is no plan": (_the_model, _the_model, fed, ["mlp.onnx", "no plan"]),
    "plan for another model": (_the_plan, _another, fed, ["other.onnx", "another model", "'a'"]),
    "plan for other operators": (_the_plan, _reordered, fed, ["other.onnx", "another model"]),
    "missing external data": (_the_plan, _without_weights, fed, ["mlp.onnx", "weights.bin"]),
    "missing input": (_the_plan, _the_model, _arrays(), ["in.npz", "'x'", "missing", "float32[64,256]"]),
    "unknown input": (_the_plan, _the_model, _arrays(x=X, q=X), ["in.npz", "'q'"]),
    "wrong shape": (
        _the_plan,
        _the_model,
        _arrays(x=X.T),
        ["in.npz", "'x'", "float32[64,256]", "float32[256,64]"],
    ),
    "wrong type": (_the_plan, _the_model, _arrays(x=X.astype(np.int64)), ["in.npz", "int64[64,256]"]),
    "pickled objects": (_the_plan, _the_model, _arrays(x=np.array([{}])), ["in.npz"]),
    "no archive": (_the_plan, _the_model, _no_archive, ["in.npz", "no .npz"]),
    "no such inputs": (_the_plan, _the_model, lambda: ["--inputs", "no.npz"], ["no.npz", "No such file"]),
    "no inputs": (_the_plan, _the_model, list, ["--inputs", "--random"]),
    "unwritable output": (_the_plan, _the_model, lambda: [*fed(), "-o", "no/out.npz"], ["no/out.npz"]),
}


@pytest.mark.parametrize("case", RUNNING)
def test_running_refuses(case, planned, folder, capsys):
    make_plan, make_model, make_options, expected = RUNNING[case]
    plan, model, options = make_plan(planned), make_model(planned), make_options()
    before = sorted(folder.iterdir())
    assert main(["run", plan, "--model", model, *options]) == cli.BAD_INPUT
    _one_line(capsys, expected)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("case", ["a model is no plan", "plan for another model"])
def test_verifying_refuses(case, planned, folder, capsys):
    make_plan, make_model, _, expected = RUNNING[case]
    assert main(["verify", make_model(planned), make_plan(planned)]) == cli.BAD_INPUT
    _one_line(capsys, expected)


def test_an_edited_plan_is_judged_as_it_is_with_a_warning(planned, folder, capsys):
    """Running it is refused; what it computes can still be checked."""
    proto = onnx.load(planned / "mlp.plan.onnx")
    proto.graph.node[0].doc_string = "a note of mine"
    onnx.save(proto, "edited.plan.onnx")
    assert main(["verify", str(planned / "mlp.onnx"), "edited.plan.onnx"]) == 0
    out, err = capsys.readouterr()
    assert "warning: edited.plan.onnx" in err and out.startswith("tested")


def test_a_mesh_needs_its_devices(planned, folder, capsys):
    """JAX runs with eight devices here; there will be no more."""
    model = planned / "mlp.onnx"
    assert main(["plan", str(model), "--mesh", "data=16", "-o", "wide.plan.onnx"]) == 0
    capsys.readouterr()
    assert main(["verify", str(model), "wide.plan.onnx"]) == cli.BAD_INPUT
    _one_line(capsys, ["16 needed", "found 8"])


def test_a_plan_that_does_not_fit_exits_with_1(folder, capsys):
    model = models.mlp(folder / "mlp.onnx")
    assert main(["plan", str(model), *MESH, "--memory", "1KB"]) == cli.REFUTED
    _one_line(capsys, ["1000 bytes"])
    assert not (folder / "mlp.plan.onnx").exists()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GB", 80_000_000_000),
        ("1GiB", 1 << 30),
        ("1.5 MB", 1_500_000),
        ("512mib", 512 << 20),
        ("123", 123),
        ("7B", 7),
    ],
)
def test_sizes(text, count):
    assert parse_bytes(text) == count


def test_shapes():
    assert parse_shapes(["x=8x3", "a=b=2"]) == {"x": (8, 3), "a=b": (2,)}
    with pytest.raises(UserError):
        parse_shapes(["=3"])
