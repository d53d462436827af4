"""The audit's numbers by hand, and its pages in a real browser."""

import importlib
import shutil
import statistics
import sys

import pytest
import yaml
from matplotlib.figure import Figure
from matplotlib.image import imread

from stapo_lite import charts
from stapo_lite.charts import Curve
from stapo_lite.config import load_config
from stapo_lite.files import read_lines, write_lines

audit_module = importlib.import_module("stapo_lite.audit")  # the package's attribute is the function

audit, compare = audit_module.audit, audit_module.compare

HOSTILE = "</script><b id=oops>$x$"


def metrics(step, **values):
    names = (
        "reward", "entropy", "entropy_p10", "entropy_p50", "entropy_p90", "candidate_share", "spurious_share",
        "silenced_share", "spurious_gradient_share", "tau_h", "grad_norm", "completion_length",
    )  # fmt: skip
    return {"step": step, "tau_p": 0.002} | dict.fromkeys(names, 0.1 * step) | values


def token(step, number, kept, **values):
    return {
        "step": step,
        "token": f" word{number}",
        "token_id": number,
        "position": number,
        "before": "Before",
        "after": " after",
        "probability": 1e-4 * (number + 1),
        "entropy": 2.0 - 0.01 * number,
        "gradient_norm": 1.0 + (number * 7 % 60) / 100,
        "advantage": 1.5,
        "tau_h": 2.5,
        "kept": kept,
        "spurious": not kept,
        "alternatives": [["rather\nthis", 0.6], [" that", 0.2]],
    } | values


@pytest.fixture
def make_run(tmp_path):
    """A run folder as training leaves it."""

    def make(name="run", steps=3, tokens=None, reward=0.0, **changes):
        folder = tmp_path / name
        folder.mkdir()
        tree = {"model": "some/model", "output_dir": str(folder)} | changes
        (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        write_lines(
            folder / "metrics.jsonl",
            [metrics(s, reward=reward + s, tau_h=None if s == 2 else 2.5) for s in range(1, steps + 1)],
        )
        if tokens is not None:
            line = {"tau_p": 0.002, "tau_h": 2.5, "tokens": [3, 1, 90, 6], "gradient_norm": [1.2, 1.1, 0.1, None]}
            line["points"] = [[0.9, 0.1, 0.05], [0.3, 2.0, 0.9]]
            write_lines(folder / "tokens.jsonl", tokens)
            write_lines(folder / "quadrants.jsonl", [{"step": s} | line for s in range(1, steps + 1)])
        return folder

    return make


@pytest.fixture
def tokens():
    """60 silenced and 5 kept, one of them hostile."""
    silenced = [token(3, 59, kept=False, token=HOSTILE, before=HOSTILE, after="你好\n")]
    silenced += [token(1 + number % 3, number, kept=False) for number in range(59)]
    return silenced + [token(2, 60 + number, kept=True, token=" kept", token_id=60) for number in range(5)]


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    executable = next(filter(None, map(shutil.which, names)), None)
    if executable is None:
        pytest.skip("no Chromium on the PATH")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Open a page that must not complain and must not ask the network."""
    contexts, complaints = [], []

    def open_(path, width=1200, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else complaints.append(r.url))
        page.goto(path.resolve().as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []


def rows(page):
    return page.locator("#tokens tbody tr").count()


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (375, "light"), (375, "dark")])
def test_the_page_renders(make_run, tokens, open_page, width, scheme):
    page = open_page(audit(make_run(tokens=tokens)), width, scheme)
    assert page.title() == "Token audit of run"
    names = ["reward", "entropy", "silenced", "tau_h", "plane", "gradient"]
    assert page.eval_on_selector_all("figure", "all => all.map(f => f.id)") == names
    assert page.eval_on_selector_all("img", "all => all.every(i => i.complete && i.naturalWidth > 400)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]
    # The pictures follow: the corner of one has the page's own colour.
    pixel = page.evaluate(
        """() => { const canvas = document.createElement("canvas").getContext("2d");
        canvas.drawImage(document.querySelector("img"), 0, 0); return [...canvas.getImageData(1, 1, 1, 1).data] }"""
    )
    assert f"rgb({', '.join(map(str, pixel[:3]))})" == background
    for cell in ("context", "alternatives", "number"):
        box = page.locator(f"#tokens td.{cell}").first.bounding_box()
        assert box["width"] > 30
        assert box["x"] + box["width"] <= width
    sizes = page.eval_on_selector_all("#tokens td", "all => all.map(c => parseFloat(getComputedStyle(c).fontSize))")
    assert min(sizes) >= 12


def test_the_table_is_filtered_and_ordered(make_run, tokens, open_page):
    page = open_page(audit(make_run(tokens=tokens)))
    count = page.locator("#count")
    assert count.inner_text() == "65 of 65 tokens"
    assert rows(page) == 50
    page.click("#more")
    assert rows(page) == 65
    assert not page.locator("#more").is_visible()
    page.select_option("[name=kind]", "kept")
    assert count.inner_text() == "5 of 65 tokens"
    assert page.locator("#tokens mark").all_inner_texts() == [" kept"] * 5
    page.select_option("[name=kind]", "silenced")
    page.fill("[name=first]", "2")
    page.fill("[name=last]", "2")
    assert count.inner_text() == "20 of 65 tokens"
    page.select_option("[name=order]", "-gradient_norm")
    shown = [float(text) for text in page.locator("#tokens td[data-name=gradient]").all_inner_texts()]
    assert shown == sorted(shown, reverse=True)
    assert shown[0] != shown[-1]
    page.fill("[name=text]", "bEFORE WORD4")
    assert count.inner_text() == "5 of 65 tokens"  # of step 2: word4, word40, word43, word46, word49
    page.fill("[name=text]", "no such text")
    assert (count.inner_text(), rows(page)) == ("0 of 65 tokens", 0)


def test_text_of_a_token_is_text(make_run, tokens, open_page):
    page = open_page(audit(make_run(tokens=tokens)))
    assert page.locator("#oops").count() == 0
    page.fill("[name=text]", "你好")
    assert page.locator("#tokens mark").inner_text() == HOSTILE
    assert page.locator("#tokens .context").inner_text().strip() == f"{HOSTILE}{HOSTILE}你好"
    assert page.locator("#tokens .alternatives").inner_text() == "0.600 rather⏎this\n0.200 ␣that"


def test_what_the_page_says_of_the_run(make_run, tokens, tmp_path, open_page):
    page = open_page(audit(make_run(tokens=tokens), tmp_path / "elsewhere"))
    facts = dict(zip(*(page.locator(f"dl {tag}").all_inner_texts() for tag in ("dt", "dd")), strict=True))
    assert facts["algorithm"] == "stapo"
    assert facts["reward, first and last step"] == "1 → 3"
    assert facts["candidates"] == "12, 9 of them spurious; 65 in the token log"
    sections = page.locator(".bars").all()
    assert sections[1].inner_text().split() == ["␣kept", "5"]
    assert len(sections[0].locator("code").all()) == 15
    assert sections[0].locator("code").first.inner_text() == HOSTILE.replace(" ", "␣")
    pictures = {path.stem for path in (tmp_path / "elsewhere").glob("*.png")}
    assert pictures == {
        "reward", "entropy", "silenced", "tau_h", "plane", "gradient", "silenced_tokens", "kept_tokens",
    }  # fmt: skip
    assert imread(tmp_path / "elsewhere" / "reward.png")[0, 0, :3].tolist() == [1.0, 1.0, 1.0]  # the light one


def test_a_run_that_silences_nothing_shows_what_stapo_would(make_run, open_page):
    tokens = [token(1, n, kept=True, spurious=n < 2) for n in range(5)]
    page = open_page(audit(make_run(tokens=tokens, algorithm="justrl")))
    page.select_option("[name=kind]", "STAPO would silence")
    assert page.locator("#count").inner_text() == "2 of 5 tokens"


def test_a_run_without_a_token_log_shows_its_curves(make_run, open_page):
    page = open_page(audit(make_run()))
    assert page.locator("figure").count() == 4
    assert "audit.enabled=true" in page.locator("body").inner_text()
    assert page.locator("form").count() == 0


def test_a_run_without_candidates(make_run, open_page):
    folder = make_run(tokens=[])
    lines = [line | {"tau_h": None, "tokens": [0] * 4, "points": []} for line in read_lines(folder / "quadrants.jsonl")]
    write_lines(folder / "quadrants.jsonl", lines)
    page = open_page(audit(folder))
    assert page.locator("figure").count() == 6
    assert page.locator("#count").inner_text() == "0 of 0 tokens"


def test_runs_over_each_other(make_run, tmp_path, open_page):
    folders = [
        make_run("a0", reward=1.0, seed=0),
        make_run("a1", reward=2.0, seed=1, steps=4),
        make_run("b", reward=5.0, algorithm="grpo"),
    ]
    page = open_page(compare(folders, tmp_path / "compared"), width=375)
    assert page.locator("figure").count() == 6
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    table = [row.locator("td").all_inner_texts() for row in page.locator("tbody tr").all()]
    # The three steps that both have: a0 means 1 + (1, 2, 3), a1 means 2 + (1, 2, 3)
    assert table[0][:4] == ["stapo", "2", "3", f"3.5 ± {statistics.stdev([3, 4]):.3g}"]
    assert table[1][:4] == ["grpo", "1", "3", "7"]


def test_mean_and_band_by_hand():
    runs = [
        [{"x": 1.0}, {"x": 2.0}, {"x": None}],
        [{"x": 3.0}, {"x": None}, {"x": None}],
        [{"x": 5.0}, {"x": 6.0}, {"x": None}, {"x": 9.0}],
    ]
    curve = audit_module.seed_curve("stapo", runs, "x")
    assert curve.label == "stapo (3 seeds)"
    assert list(curve.steps) == [1, 2, 3]
    assert curve.values == [3.0, 4.0, None]
    assert curve.low == pytest.approx([1.0, 4 - 8**0.5, None])
    assert curve.high == pytest.approx([5.0, 4 + 8**0.5, None])
    assert audit_module.seed_curve("stapo", runs[:1], "x").low is None
    assert audit_module.last_mean(runs, "x", window=2) == f"{(2 + 9) / 2:.3g} ± {statistics.stdev([2.0, 9.0]):.3g}"


def test_curves_are_called_by_what_differs(make_run):
    runs = {
        "a": {},
        "b": {"seed": 7, "output_dir": "elsewhere", "log": {"save_steps": 1}, "train": {"max_steps": 7}},
        "c": {"objective": {"s2t": {"tau_p": 0.01}}},
        "d": {"algorithm": "grpo", "train": {"max_steps": 9}},
        "e": {"algorithm": "dapo", "data": {"chat_template_kwargs": {"enable_thinking": False}}},
        "f": {"algorithm": "dapo", "data": {"prompt_suffix": "x" * 99}},
    }
    configs = [load_config(make_run(name, **changes) / "config.yaml") for name, changes in runs.items()]
    assert audit_module.run_labels(configs) == [
        "stapo, objective.s2t.tau_p=0.002",
        "stapo, objective.s2t.tau_p=0.002",
        "stapo, objective.s2t.tau_p=0.01",
        "grpo",
        "dapo, data.prompt_suffix=, data.chat_template_kwargs.enable_thinking=False",
        f"dapo, data.prompt_suffix={'x' * 30}, data.chat_template_kwargs.enable_thinking=None",
    ]


def drawn(draw):
    axes = Figure().subplots()
    draw(axes)
    return axes


def test_a_logarithmic_chart_leaves_zeros_out():
    curve = Curve("x", [1, 2, 3], [0.1, 0.0, None], low=[0.0, 0.0, None], high=[1.0, 0.0, None])
    axes = drawn(charts.lines([curve], "share", log=True))
    assert axes.get_yscale() == "log"
    assert [value == value for value in axes.lines[0].get_ydata()] == [True, False, False]
    assert drawn(charts.lines([Curve("x", [1], [0.0])], "share", log=True)).get_yscale() == "linear"
    assert drawn(charts.lines([curve], "share")).lines[0].get_ydata()[1] == 0.0


def test_a_band_that_reaches_zero_has_no_hole():
    curve = Curve("$x$", [1, 2], [0.1, 0.2], low=[-0.1, 0.15], high=[0.3, 0.25])
    axes = drawn(charts.lines([curve, curve], "share", log=True))
    assert axes.collections[0].get_paths()[0].vertices[:, 1].min() == 0.1
    assert axes.get_legend().get_texts()[0].get_text() == "$x$"
    assert not axes.get_legend().get_texts()[0].get_parse_math()


def test_parts_of_a_character_are_told_apart():
    tokens = [token(1, n, kept=False, token="\ufffd") for n in (1, 1, 2)]
    assert audit_module.frequent(tokens) == [("\ufffd #1", 2), ("\ufffd #2", 1)]


def test_labels_of_bars_are_taken_literally(recwarn):
    axes = drawn(charts.bars(["$x^2$", "你 b", "a\nb"], [3, 2, 1], ["red"], "n"))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["$x^2$", "\\u4f60 b", "a\nb"]
    assert not any(label.get_parse_math() for label in axes.get_yticklabels())
    charts.png(charts.bars(["$x^2$", "你"], [3, 2], ["red"], "n"), "dark")
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


def test_thinning():
    assert audit_module.thin(list(range(10)), 4) == [0, 3, 6, 9]
    assert audit_module.thin(list(range(4)), 4) == [0, 1, 2, 3]
    assert audit_module.thin([], 4) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/none"], "none: no metrics.jsonl with steps in it; is it a run folder?"),
        (["{tmp}/run", "{tmp}/none"], "one run folder, or: compare"),
        (["compare", "{tmp}/run"], "compare: give two run folders or more"),
        (["compare", "{tmp}/run", "{tmp}/none"], "none: no metrics.jsonl"),
        (["{tmp}/run", "--out", "/proc/x"], "/proc/x: cannot be written"),
    ],
)
def test_mistakes_are_one_line(make_run, tmp_path, monkeypatch, capsys, arguments, message):
    make_run()
    monkeypatch.setattr(sys, "argv", ["audit", *(a.format(tmp=tmp_path) for a in arguments)])
    with pytest.raises(SystemExit) as exit_:
        audit_module.main()
    assert exit_.value.code == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error


def test_the_command_says_where_the_page_is(make_run, tmp_path, monkeypatch, capsys):
    folder = make_run()
    monkeypatch.setattr(sys, "argv", ["audit", str(folder)])
    audit_module.main()
    assert capsys.readouterr().out == f"page: {folder}/audit/index.html\n"
    monkeypatch.setattr(sys, "argv", ["audit", "compare", str(folder), str(make_run("other", seed=1))])
    monkeypatch.chdir(tmp_path)
    audit_module.main()
    assert capsys.readouterr().out == "page: runs/compare/index.html\n"
    assert (tmp_path / "runs" / "compare" / "spurious_gradient.png").exists()
