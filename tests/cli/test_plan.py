"""`pentameter plan`: its object, its page, its pictures, and that it loads no torch."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from pentameter.cli import plan
from pentameter.errors import ConfigError
from pentameter.formatting import duration

CLUSTER = ["--cluster", "a100-80gb:8x128"]


@pytest.fixture(autouse=True)
def no_measured_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def planned(capsys, *arguments):
    assert plan.run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_object(capsys):
    found = planned(
        capsys, "gpt3-175b", *CLUSTER, "--layout", "tensor=8,pipeline=16", "--price", "2"
    )
    assert found["model"]["parameters"] == 174_604_836_864
    assert (found["layout"]["data"], found["layout"]["pipeline"]) == (8, 16)
    assert found["batch"]["tokens_per_step"] == 3_145_728
    assert found["time"]["step_seconds"] == pytest.approx(32, rel=0.15)  # as published
    assert found["time"]["tokens_per_second"] * found["time"]["step_seconds"] == pytest.approx(
        found["batch"]["tokens_per_step"]
    )
    assert set(found["memory"]) > {
        "weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "total_bytes"
    }  # fmt: skip
    assert found["fits"] is True
    assert found["price"] == pytest.approx(2 * found["time"]["device_hours"])
    assert isinstance(found["warnings"], list)


TIGHT = [
    "llama3-70b", "--cluster", "h100-80gb:8x2", "--train.micro-batch-size", "1",
    "--train.activation-checkpoint", "full",
    "--layout", "tensor=8,sequence=true,pipeline=2,schedule=interleaved,virtual_stages=5",
]  # fmt: skip
"""148 MB to spare of 84 GB."""


def test_time_is_a_range_with_what_is_assumed(capsys, tmp_path):
    page = tmp_path / "plan.html"
    arguments = ["llama3-8b", "--layout", "zero=3", "--train.activation-checkpoint", "selective"]
    ranges = {}
    for cluster in ("h100-80gb:8x1", "h100-2023:8x1"):
        asked = [*arguments, "--cluster", cluster]
        found = planned(capsys, *asked)
        least, most = ranges[cluster] = found["time"]["step_seconds_range"]
        assert least < found["time"]["step_seconds"] < most
        assert plan.run([*asked, "--html", str(page)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assumed = found["cluster"]["assumes"]
        assert f"assumes {assumed}" in said
        assert f"({duration(least)} to {duration(most)})" in said
        assert f"{duration(least)} to {duration(most)}" in page.read_text(encoding="utf-8")
    assert "libraries of 2023" in assumed
    assert ranges["h100-80gb:8x1"][1] < ranges["h100-2023:8x1"][1]


def test_what_leaves_no_margin_is_tight_everywhere(capsys, tmp_path):
    found = planned(capsys, *TIGHT)
    assert (found["verdict"], found["fits"]) == ("tight", False)
    assert 0 < found["memory"]["spare_bytes"] < 1e9
    assert any(line.startswith("tight: ") for line in found["warnings"])
    page = tmp_path / "plan.html"
    assert plan.run([*TIGHT, "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert "~ tight: " in said
    assert "✓" not in said
    assert "tight: " in page.read_text(encoding="utf-8")


def test_a_search_says_what_is_tight(capsys):
    assert plan.run([*TIGHT[:3], "--search"]) == 0
    said = capsys.readouterr().out
    assert "✓ fits with" in said
    assert "148 MB, tight" in said
    assert "faster, but tight" in said


def test_the_view_says_the_verdict_first(capsys):
    assert plan.run(["gpt2-124m", "--cluster", "h100-80gb:8x1"]) == 0
    said = capsys.readouterr().out
    assert "✓ fits with" in said
    for word in ("tokens/s", "MFU", "device-hours", "activations", "compute", "optimizer"):
        assert word in said


def test_an_imbalance_of_experts_is_said(capsys):
    mixture = ("qwen3-30b-a3b", "--cluster", "h100-80gb:8x1", "--layout", "zero=1,expert=8")
    assert plan.run([*mixture]) == 0
    assert "imbalance 1 assumed (ranks' experts get equally many tokens)" in " ".join(
        capsys.readouterr().out.split()
    )
    even, uneven = planned(capsys, *mixture), planned(capsys, *mixture, "--imbalance", "1.25")
    assert (even["imbalance"], uneven["imbalance"]) == (1.0, 1.25)
    assert uneven["time"]["step_seconds"] > 1.05 * even["time"]["step_seconds"]
    assert uneven["memory"]["activations_bytes"] > even["memory"]["activations_bytes"]
    with pytest.raises(ConfigError, match=r"--imbalance 0.5 must be at least 1"):
        plan.run([*mixture, "--imbalance", "0.5"])
    with pytest.raises(ConfigError, match=r"--imbalance inf must be at least 1"):
        plan.run([*mixture, "--imbalance", "inf"])
    with pytest.raises(
        ConfigError, match=r"--imbalance 2 is about experts, and gpt2-124m has none"
    ):
        plan.run(["gpt2-124m", "--imbalance", "2"])


def test_the_search_lists_layouts_best_first(capsys):
    found = planned(capsys, "gpt2-124m", "--cluster", "h100-80gb:4x1", "--search")
    times = [each["time"]["step_seconds"] for each in found["layouts"]]
    assert times == sorted(times)
    assert found["time"]["step_seconds"] == times[0]
    assert all(each["fits"] for each in found["layouts"])


def test_a_layout_is_applied_before_the_configuration_is_checked(capsys):
    asked = ["gpt2-124m", "--cluster", "h100-80gb:2x1", "--train.offload", "true"]
    found = planned(capsys, *asked, "--layout", "data=2,zero=3")  # the preset's own is zero 0
    assert found["layout"]["zero"] == 3
    with pytest.raises(ConfigError, match=r"parallel\.zero=0 shares nothing"):
        plan.run([*asked, "--layout", "data=2"])
    assert plan.run([*asked[:1], *asked[3:], "--layout", "data=2,zero=1", "--json"]) == 0


def test_the_layout_best_is_the_search(capsys):
    asked = ["gpt2-124m", "--cluster", "h100-80gb:2x1"]
    assert planned(capsys, *asked, "--layout", "best")["layouts"]


def test_the_page_and_the_schedule(capsys, tmp_path):
    page, picture = tmp_path / "plan.html", tmp_path / "schedule.svg"
    asked = ["gpt3-175b", *CLUSTER, "--train.tokens-per-step", "524288"]
    found = planned(
        capsys, *asked, "--layout", "tensor=8,pipeline=16", "--html", str(page),
        "--timeline", str(picture),
    )  # fmt: skip
    root = ElementTree.fromstring(picture.read_text())
    passes = [each for each in root.iter() if each.tag.endswith("rect")]
    n_passes = 16 * 2 * found["batch"]["n_micro_batches"]
    assert len(passes) == n_passes + 16 + 2 + 1  # rows, legend, background
    text = page.read_text()
    assert "gpt3-175b" in text
    assert "Which rank holds what" in text
    assert "What to change first" in text
    assert "less time; --search looks further" in text
    assert "recomputes full" in text
    assert "process 15" in text


def test_a_long_title_stays_in_the_picture(capsys, tmp_path):
    picture = tmp_path / "schedule.svg"
    layout = "tensor=8,sequence=true,pipeline=8,schedule=interleaved,virtual_stages=12,zero=1"
    planned(capsys, "gpt3-175b", *CLUSTER, "--layout", layout, "--timeline", str(picture))
    words = [e for e in ElementTree.fromstring(picture.read_text()).iter() if e.get("x") == "8"]
    lines = [each for each in words if each.tag.endswith("text")]
    assert "virtual_stages=12" in lines[0].text
    assert "the first 32 micro-batches are shown" in lines[1].text
    for each in lines:
        size = float(each.get("font-size", 11))
        assert 8 + 0.65 * size * len(each.text) < 1200, each.text  # bold DejaVu Sans


def test_a_long_layout_breaks_where_it_has_a_comma(capsys, tmp_path):
    page = tmp_path / "plan.html"
    found = planned(
        capsys, "gpt2-124m", "--cluster", "h100-80gb:4x1", "--search", "--html", str(page)
    )
    assert any(each["layout"]["pipeline"] > 1 for each in found["layouts"])
    assert ",<wbr>pipeline=" in page.read_text()


def test_a_picture_of_scaling_is_no_page(tmp_path):
    with pytest.raises(ConfigError, match=r"page\.html: of --scale a picture is drawn"):
        plan.run(["gpt2-124m", *CLUSTER, "--scale", "--html", str(tmp_path / "page.html")])


def test_without_a_cluster_there_is_no_time(capsys):
    found = planned(capsys, "gpt2-124m")
    assert found["time"]["step_seconds"] is None
    assert found["memory"]["total_bytes"] > 0
    with pytest.raises(ConfigError, match="--search needs to know the devices"):
        plan.run(["gpt2-124m", "--search"])
    with pytest.raises(ConfigError, match="has no pipeline"):
        plan.run(["gpt2-124m", "--cluster", "h200", "--timeline", "x.svg"])


def test_it_needs_no_torch():
    code = (
        "import sys; from pentameter.cli.main import main; "
        "assert main(['plan', 'gpt2-124m', '--cluster', 'h100-80gb:8x1', '--json']) == 0; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("price", ["-1", "nan", "inf"])
def test_a_price_is_money(price):
    with pytest.raises(ConfigError, match=rf"--price {price} must be an amount of money"):
        plan.run(["gpt2-124m", "--cluster", "h100-80gb:4x1", f"--price={price}"])
