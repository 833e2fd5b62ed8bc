"""The programs in examples/ run, and do what they say, on a small configuration."""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = [
    "--model.n-layers=1",
    "--model.d-model=32",
    "--model.context-length=32",
    "--train.batch-size=4",
    "--train.eval-interval=60",
    "--train.precision=fp32",
    "--train.compile=false",
    "--data.grammar.n-characters=20000",
]


def run_hooks(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "hooks.py", *TINY, *arguments],
        cwd=folder, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_hooks_measure_schedule_and_stop(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # One hidden state and 16 letters: ln 16 = 2.77 nats at first, 1.65 for who knows the letters.
    said = run_hooks(tmp_path, "--data.grammar.n-states=1", "--train.steps=120")
    lines = (tmp_path / "runs" / "grammar" / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    rates = {e["step"]: e["learning_rate"] for e in events if e["event"] == "train"}
    assert rates[1] == pytest.approx(3e-3 / 25)
    assert rates[50] == pytest.approx(3e-3 * (25 / 50) ** 0.5)
    norms = [(e["step"], e["value"]) for e in events if e["event"] == "weight_norm"]
    assert norms[0][0] == 50
    assert norms[0][1] > 1
    assert "ended after step 60: validation loss " in said
    assert events[-1]["reason"].endswith("is below 2.1")
    assert (tmp_path / "runs" / "grammar" / "checkpoints" / "step-00000060").is_dir()


@pytest.mark.parametrize(
    ("page", "program"),
    [
        ("python-api.md", "hooks.py"),
        ("examples.md", "own_model.py"),
        ("examples.md", "vision_transformer.py"),
    ],
)
def test_the_documentation_shows_the_example_as_it_is(page, program):
    """The site's builder puts the program in; a formatter of Markdown must let the line be."""
    assert (EXAMPLES / program).is_file()
    text = (EXAMPLES.parent / "docs" / page).read_text(encoding="utf-8")
    assert f'<!-- fmt: off -->\n```python\n--8<-- "examples/{program}"\n```\n' in text


class Listener(BaseHTTPRequestHandler):
    """Keeps what is posted."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.told.append((self.path, json.loads(body)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def listener():
    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        server.told = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def notify(listener):
    """examples/notify.py as a module, and a run that tells the listener and a port where nobody
    listens."""
    spec = importlib.util.spec_from_file_location("notify", EXAMPLES / "notify.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    said = []
    run = SimpleNamespace(
        world=SimpleNamespace(is_main=True), run_dir=Path("runs/a"),
        config=SimpleNamespace(name="a"), state=SimpleNamespace(step=7),
        console=SimpleNamespace(say=said.append), said=said,
    )  # fmt: skip
    hook = module.Notify("http://127.0.0.1:9/secret", f"http://127.0.0.1:{listener.server_port}/x")
    return SimpleNamespace(module=module, hook=hook, run=run)


def test_somebody_is_told_how_a_run_ended(notify, listener):
    notify.hook.on_end(notify.run, SimpleNamespace(kind="completed", step=7, reason="completed"))
    notify.hook.on_error(notify.run, ValueError("the loss is nan"))
    first, second = (told for _, told in listener.told)
    assert first == {
        "run": "runs/a", "name": "a", "kind": "completed", "step": 7,
        "text": "a ended after step 7: completed",
    }  # fmt: skip
    assert (second["kind"], second["text"]) == ("error", "a failed at step 7: the loss is nan")
    assert len(notify.run.said) == 2  # the port where nobody listens
    assert not any("secret" in line for line in notify.run.said)
    notify.run.world.is_main = False
    notify.hook.on_error(notify.run, ValueError("told by the main process"))
    assert len(listener.told) == 2


def test_a_mail_says_the_same(notify, monkeypatch):
    sent = []

    class Server(contextlib.nullcontext):
        def __init__(self, host, port, timeout):
            super().__init__(self)
            self.send_message = lambda mail: sent.append((host, port, mail))

    monkeypatch.setattr(notify.module.smtplib, "SMTP", Server)
    monkeypatch.setenv("SMTP_HOST", "mail.example.org:2525")
    notify.module.send("mailto:me@example.org", {"text": "a ended\nhere", "step": 7})
    ((host, port, mail),) = sent
    assert (host, port, mail["To"], mail["Subject"]) == (
        "mail.example.org", 2525, "me@example.org", "a ended",
    )  # fmt: skip
    assert json.loads(mail.get_content())["step"] == 7


def test_a_chat_gets_a_message(notify, monkeypatch):
    asked = []
    opened = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(
        notify.module.urllib.request, "urlopen",
        lambda request, timeout: asked.append(request) or opened,
    )  # fmt: skip
    notify.module.send("https://hooks.slack.com/services/T/B/X", {"text": "a ended", "step": 7})
    assert json.loads(asked[0].data) == {"text": "a ended"}


NOTEBOOK = EXAMPLES / "first-steps.ipynb"
# Jupyter would be a large dependency of the tests, and starts a kernel that listens on sockets. Its
# code cells are Python, run one after another in one namespace: that is what this does.
RUN_NOTEBOOK = """
import json, sys
namespace = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), namespace)
curve = namespace["curve"]
drawn = [len(line.get_xdata()) for line in curve.axes.get_lines()]
print("\\nfacts:" + json.dumps({"drawn": drawn, "losses": curve.losses}))
"""


def test_the_notebook_runs_from_its_own_text_to_a_sample(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RUN_NOTEBOOK, NOTEBOOK],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600,
        env={
            **os.environ, "MPLBACKEND": "Agg", "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "OMP_NUM_THREADS": "1",  # on a busy machine threads that wait for each other take long
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said, _, facts = done.stdout.partition("\nfacts:")
    drawn, losses = json.loads(facts).values()
    assert drawn == [200, 5]  # each step, and evaluations at 0, 50, … 200
    assert losses[0] > 4
    assert losses[-1] < 3
    written = (tmp_path / "my-text.txt").read_text()
    sample = said.rpartition("completed after step 200\n")[2]
    code = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"]]
    assert "flush=True" not in code[10]  # each such piece is an output of its own in the notebook
    assert sample.startswith(written[:20])
    assert len(sample.rstrip("\n")) > 200
    assert set(sample) <= set(written)


def test_the_notebook_is_one_without_what_somebodys_run_left_in_it():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert {cell["cell_type"] for cell in cells} == {"markdown", "code"}
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        assert isinstance(cell["source"], list)
        code = {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
        expected = {"cell_type", "id", "metadata", "source", *code}
        assert set(cell) == expected
        assert {name: cell[name] for name in code} == code


OWN_MODEL = [
    "--model.n-layers=2",
    "--model.d-model=16",
    "--model.attention.n-heads=2",
    "--model.feed-forward.width=16",
    "--model.context-length=32",
    "--train.batch-size=8",
    "--train.steps=12",
    "--train.eval-interval=6",
    "--train.precision=fp32",
    "--train.compile=false",
    "--data.grammar.n-characters=20000",
    "--log.interval=1",
    "--schedule.warmup-steps=0",
    "--optimizer.learning-rate=1e-2",
]


def run_own_model(
    folder: Path, name: str, n_processes: int, *arguments: str, example: str = "own_model.py"
) -> list[float]:
    """The training losses of a run of an example, then those of what it holds out."""
    start = [sys.executable]
    if n_processes > 1:
        start += ["-m", "torch.distributed.run", f"--nproc-per-node={n_processes}"]
        start += ["--standalone"]
    done = subprocess.run(
        [*start, EXAMPLES / example, *OWN_MODEL, "--name", name, *arguments],
        cwd=folder, capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    kinds = ("train", "eval", "held_out")
    return [e["loss"] for kind in kinds for e in events if e["event"] == kind]


def test_one_s_own_model_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    losses = run_own_model(tmp_path, "alone", 1)
    assert len(losses) == 12 + 3
    assert losses[11] < losses[0] - 0.1


@pytest.mark.slow
def test_one_s_own_model_has_one_curve_on_every_layout_and_goes_on_on_another(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    alone = run_own_model(tmp_path, "alone", 1)
    for layout in ("data=2", "zero=3", "tensor=2", "pipeline=2"):
        curve = run_own_model(tmp_path, layout.replace("=", "-"), 2, f"--parallel.{layout}")
        assert curve == pytest.approx(alone, rel=2e-6), layout
    shutil.rmtree(tmp_path / "runs" / "zero-3" / "checkpoints" / "step-00000012")
    assert run_own_model(tmp_path, "zero-3", 2, "--parallel.pipeline=2") == pytest.approx(
        alone, rel=2e-6
    )


IMAGES = ["--model.context-length=16", "--train.steps=40", "--train.batch-size=16"]


def verify_images(folder: Path, layouts: str) -> list[str]:
    """What the example says of each layout; it ends with 0 where all are equal."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "vision_transformer.py", "verify", layouts],
        cwd=folder, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_vision_transformer_is_the_same_on_four_processes(tmp_path):
    (said,) = verify_images(tmp_path, "tensor=2,sequence=1,pipeline=2")
    assert said.startswith("equal  tensor 2 (sequence) × pipeline 2 (1f1b): ")


@pytest.mark.slow
def test_the_vision_transformer_is_the_same_on_eight_processes(tmp_path):
    layouts = "data=2,zero=3,tensor=2,pipeline=2;data=2,zero=2,pipeline=2,schedule=zero-bubble"
    said = verify_images(tmp_path, layouts)
    assert said[0].startswith("equal  data 2 (ZeRO 3) × tensor 2 × pipeline 2 (1f1b): ")
    assert said[1].startswith("equal  ")


@pytest.mark.slow
def test_the_vision_transformer_has_one_curve_on_every_layout(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    example = "vision_transformer.py"
    alone = run_own_model(tmp_path, "alone", 1, *IMAGES, example=example)
    assert len(alone) == 40 + 1
    assert alone[39] < alone[0] - 0.05
    for layout in (["zero=3"], ["tensor=2", "sequence=true"], ["pipeline=2"]):
        arguments = [*IMAGES, *(f"--parallel.{each}" for each in layout)]
        curve = run_own_model(tmp_path, layout[0], 2, *arguments, example=example)
        assert curve == pytest.approx(alone, rel=1e-4), layout
