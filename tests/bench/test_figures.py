"""The figures say what the committed records say, and nothing where there are none."""

import numpy as np
import pytest

from carat_jax.bench import figures
from carat_jax.bench.drawing import DARK, LIGHT, page, save

ROWS = figures.read_rows()
BY_NAME = {figure.name: figure for figure in figures.FIGURES}


def axes_of(name: str, rows) -> list:
    """The axes of a figure drawn from `rows`."""
    figure = BY_NAME[name]
    with page(LIGHT, *figure.size) as drawn:
        figure.draw(figure.rows(rows))(drawn, LIGHT)
    return drawn.axes


def lines_of(axis) -> dict[str, tuple[list, list]]:
    return {line.get_label(): tuple(map(list, line.get_data())) for line in axis.lines}


def test_the_core_figure_shows_the_records_in_microseconds():
    (axis,) = axes_of("4-core", ROWS)
    shape = {"case": "grouped", "kv_heads": 4, "positions": 4, "keys": 131005}
    net = {row["variant"]: row for row in ROWS if shape.items() <= row.items()}
    lines = lines_of(axis)
    for label, variant in (
        ("grouped, fused", "kv"),
        ("one program a query head", "per_head"),
        ("grouped, three stages", "three_stage_padded"),
        ("grouped, fused, v_rot", "v_rot"),
    ):
        xs, ys = lines[label]
        assert xs == [6005, 32005, 131005]
        assert ys[-1] == net[variant]["net_us"]
    # 131,005 keys and values of four heads of 512 in bfloat16, at the card's read speed.
    least = 2 * 131005 * 4 * 512 * 2 / lines["keys and values read once"][1][-1] / 1e3
    assert 4300 < least < 4500  # GB/s
    assert axis.get_xscale() == axis.get_yscale() == "log"


def test_the_padding_figure_holds_every_count_against_its_rung():
    axes = axes_of("2-padding", ROWS)
    for axis, variant in zip(axes, ("scores", "whole"), strict=True):
        times = {r["keys"]: r["net_us"] for r in ROWS if r.get("variant") == variant}
        exact, padded = axis.lines[:2]
        assert dict(zip(*exact.get_data(), strict=True)) == times
        counts, at_rung = padded.get_data()
        assert {5960, 6005, 6016} <= set(counts)
        assert [times[-(-n // 64) * 64] for n in counts] == list(at_rung)


def test_the_last_columns_are_masked_one_position_after_another_and_padded_past_the_count():
    (axis,) = axes_of("3-columns", ROWS)
    (mesh,) = axis.collections
    cells = np.asarray(mesh.get_array()).reshape(32, 64)
    assert (cells == cells[:4][np.arange(32) % 4]).all()
    # 5,952 + 52 is the last of 6,005 keys; position t of four sees all but the 3 - t after it.
    for t in range(4):
        assert cells[t].tolist() == [0] * (50 + t) + [1] * (3 - t) + [2] * 11


def test_the_rings_figure_shows_every_layout_that_fits():
    slots, times = axes_of("rings", ROWS)
    lines = lines_of(times)
    layouts = [row for row in ROWS if row.get("case") == "layouts" and row["batch"] == 1]
    for variant, (xs, ys) in lines.items():
        fits = [row for row in layouts if row["variant"] == variant and row["fits"]]
        assert dict(zip(xs, ys, strict=True)) == {r["context"]: r["net_us"] for r in fits}
    assert lines["ring"][0] == [2048, 32768, 131072]
    assert lines["full"][0] == [2048, 32768]
    # Slot = position mod 12, and the text in a cell is the position.
    for text in slots.texts:
        (x, y), held = text.get_position(), int(text.get_text())
        assert held % 12 == int(y)
        assert int(x) - 12 < held <= int(x)


def serving(row: str, concurrency: int, tpot: float, **more) -> dict:
    return {
        "bench": "serving", "mode": "closed", "model": "random:31b", "row": row,
        "concurrency": concurrency,
        "tpot_ms_p50": tpot, "output_tokens_per_s": 1e3 * concurrency / tpot, "requests": 9, **more,
    }  # fmt: skip


def test_the_ladder_takes_the_last_record_of_each_row_where_most_requests_were_served():
    rows = [serving(row, count, 99.0) for count in (1, 8) for row in "abcd"]
    many = [("a", 70), ("a", 40), ("b", 20), ("c", 10), ("d", 8)]
    rows += [serving(row, 4, tpot, requests=64) for row, tpot in many]
    rows += [serving(row, 4, 1.0, requests=64, model="random:26b-a4b") for row in "abcd"]
    (axis,) = axes_of("1-ladder", [*ROWS, *rows])
    assert [bar.get_width() for bar in axis.patches] == [40, 20, 10, 8]
    assert [text.get_text() for text in axis.texts][-1] == " 8.0 ms   5.00 x"
    assert len(axes_of("5-serving", rows)) == 2


def test_a_figure_without_records_is_left_out_and_says_what_makes_them(tmp_path):
    rows = [row for row in ROWS if row.get("case") == "padding"]
    missing = figures.write(tmp_path, rows)
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    assert drawn == {f"{n}-{t}" for n in ("2-padding", "3-columns") for t in ("light", "dark")}
    assert [line.split(":")[0] for line in missing] == [
        "rings",
        "1-ladder",
        "4-core",
        "5-serving",
        "6-limit",
    ]
    assert "python -m carat_jax.bench.kernels --cases=grouped,torch" in missing[2]
    sources = (tmp_path / "sources.md").read_text()
    assert f"`2-padding`: {len(rows)} records; NVIDIA H200, jax " in sources
    assert rows[0]["commit"][:12] in sources


def test_every_committed_record_says_where_it_comes_from():
    for row in ROWS:
        assert row["device"]
        assert row["jax"]
        assert row["commit"]
        assert row["command"].startswith("python ")


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_pictures_are_drawn_on_paper_of_their_theme(tmp_path, theme):
    from matplotlib.image import imread

    (path,) = save(lambda figure, theme: figure.subplots(), tmp_path, "some", (2, 1), (theme,))
    corner = np.round(255 * imread(path)[0, 0, :3]).astype(int)
    assert "#{:02x}{:02x}{:02x}".format(*corner) == theme.paper
