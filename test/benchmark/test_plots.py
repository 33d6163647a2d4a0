# SPDX-License-Identifier: Apache-2.0
import pytest
from verify_bench import results

plot = pytest.importorskip("plot_mla_tree_verify", reason="needs matplotlib", exc_type=ImportError)


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


@pytest.fixture
def result(tmp_path, make_result):
    times = {("ours", f"prefix={p}"): p / 2000 + 6 for p in (1024, 16384, 189440)}
    times |= {("triton_extend", f"prefix={p}"): p / 5 for p in (1024, 16384, 189440)}
    times |= {("ours", f"prefix={p},kv=fp8"): p / 3000 + 6 for p in (1024, 189440)}
    times |= {("ours", "prefix=16384,q=33"): 40.0}
    path = tmp_path / "r.json"
    results.save(path, make_result(times))
    return path


def test_two_images_beside_the_result(result):
    assert plot.main([str(result)]) == 0
    images = sorted(result.parent.glob("*.png"))
    assert [p.name for p in images] == ["mla_tree_verify_context.png", "mla_tree_verify_roofline.png"]
    for path in images:
        width, height = png_size(path)
        assert width > 800 and height > 500 and path.stat().st_size > 20_000


def test_out_folder_and_a_file_without_rates(tmp_path, make_result):
    data = make_result({("ours", "prefix=1024"): 7.0})
    data["header"].update(gpu=None, device="cpu", ceilings={})
    results.save(tmp_path / "r.json", data)
    assert plot.main([str(tmp_path / "r.json"), "--out", str(tmp_path / "images")]) == 0
    assert len(list((tmp_path / "images").glob("*.png"))) == 2


def test_the_series_are_the_rows(result, monkeypatch):
    """What is drawn, not only that something is."""
    drawn = {}
    monkeypatch.setattr(plot.plt.Figure, "savefig", lambda self, path, **kw: drawn.update({path.name: self.axes[0]}))
    plot.main([str(result)])
    lines = {line.get_label(): line for line in drawn["mla_tree_verify_context.png"].get_lines()}
    assert list(lines["ours"].get_xdata()) == [1024, 16384, 189440]
    assert list(lines["Triton extend"].get_ydata()) == pytest.approx([204.8, 3276.8, 37888])
    assert list(lines["ours, fp8 KV"].get_xdata()) == [1024, 189440]
    floor = lines["floor: KV read once, or the MMAs"].get_ydata()
    assert floor[-1] == pytest.approx(218245.248 / 4000)
    roofline = {line.get_label(): line for line in drawn["mla_tree_verify_roofline.png"].get_lines()}
    assert len(roofline["ours"].get_xdata()) == 6
    assert max(roofline["copy rate 4,000 GB/s"].get_ydata()) == pytest.approx(600), (
        "the roof bends where the two ceilings meet"
    )


@pytest.mark.parametrize("text", ["{}", "no json"])
def test_a_bad_file_is_an_argument_error(tmp_path, capsys, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        plot.main([str(path)])
    assert stop.value.code == 2 and "error:" in capsys.readouterr().err
