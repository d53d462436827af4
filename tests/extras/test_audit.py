"""The audit's numbers by hand, and its page in a real browser."""

import shutil

import pytest
from helpers import MINIMAL, command, write_yaml
from matplotlib.figure import Figure
from matplotlib.image import imread

from stapo_lite.extras.audit import charts
from stapo_lite.extras.audit.charts import Curve
from stapo_lite.extras.audit.page import audit, frequent
from stapo_lite.files import read_lines, write_lines

MILLISECONDS = 300_000  # a loaded machine takes its time to start a browser

HOSTILE = "</script><b id=oops>$x$"


def metrics(step, **values):
    names = (
        "reward", "entropy", "sampled_nll", "entropy_p10", "entropy_p50", "entropy_p90",
        "candidate_share",
        "spurious_share", "silenced_share", "spurious_gradient_share", "tau_h", "grad_norm",
        "completion_length",
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
    def make(name="run", steps=3, tokens=None, reward=0.0, **changes):
        folder = tmp_path / name
        folder.mkdir()
        write_yaml(
            folder / "config.yaml",
            MINIMAL | {"model": "some/model", "output_dir": str(folder)} | changes,
        )
        lines = [
            metrics(s, reward=reward + s, tau_h=None if s == 2 else 2.5)
            for s in range(1, steps + 1)
        ]
        write_lines(folder / "metrics.jsonl", lines)
        if tokens is not None:
            line = {
                "tau_p": 0.002,
                "tau_h": 2.5,
                "tokens": [3, 1, 90, 6],
                "gradient_norm": [1.2, 1.1, 0.1, None],
            }
            line["points"] = [[0.9, 0.1, 0.05], [0.3, 2.0, 0.9]]
            write_lines(folder / "tokens.jsonl", tokens)
            write_lines(
                folder / "quadrants.jsonl", [{"step": s} | line for s in range(1, steps + 1)]
            )
        return folder

    return make


@pytest.fixture
def tokens():
    """60 silenced and 5 kept, one of them hostile."""
    silenced = [token(3, 59, kept=False, token=HOSTILE, before=HOSTILE, after="你好\n")]
    silenced += [token(1 + number % 3, number, kept=False) for number in range(59)]
    return silenced + [
        token(2, 60 + number, kept=True, token=" kept", token_id=60) for number in range(5)
    ]


@pytest.fixture(scope="module")  # the driver's event loop must not outlive these tests
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    executable = next(filter(None, map(shutil.which, names)), None)
    if executable is None:
        pytest.skip("no Chromium on the PATH")
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with (
        playwright.sync_playwright() as p,
        p.chromium.launch(
            executable_path=executable, args=options, timeout=MILLISECONDS
        ) as browser,
    ):
        yield browser


@pytest.fixture
def open_page(browser):
    """Pages must not complain and must not ask the network."""
    complaints = []

    def open_(path, width=1200):
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.set_default_timeout(MILLISECONDS)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda r: None if r.url.startswith(("file:", "data:")) else complaints.append(r.url),
        )
        page.goto(path.resolve().as_uri())
        return page

    yield open_
    assert complaints == []


@pytest.mark.parametrize("width", [1200, 375])
def test_the_page_renders(make_run, tokens, open_page, width):
    page = open_page(audit(make_run(tokens=tokens)), width)
    assert page.title() == "Token audit of run"
    names = ["reward", "entropy", "silenced", "tau_h", "plane", "gradient"]
    assert page.eval_on_selector_all("figure", "all => all.map(f => f.id)") == names
    assert page.eval_on_selector_all(
        "img", "all => all.every(i => i.complete && i.naturalWidth > 400)"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for cell in ("context", "alternatives", "number"):
        box = page.locator(f"#tokens td.{cell}").first.bounding_box()
        assert box["width"] > 30
        assert box["x"] + box["width"] <= width
    sizes = page.eval_on_selector_all(
        "#tokens td", "all => all.map(c => parseFloat(getComputedStyle(c).fontSize))"
    )
    assert min(sizes) >= 12


def test_the_table_is_filtered_and_ordered(make_run, tokens, open_page):
    page = open_page(audit(make_run(tokens=tokens)))
    count = page.locator("#count")
    assert count.inner_text() == "65 of 65 tokens"
    rows = page.locator("#tokens tbody tr")
    assert rows.count() == 50
    page.click("#more")
    assert rows.count() == 65
    assert not page.locator("#more").is_visible()
    page.select_option("[name=kind]", "kept")
    assert count.inner_text() == "5 of 65 tokens"
    assert page.locator("#tokens mark").all_inner_texts() == [" kept"] * 5
    page.select_option("[name=kind]", "silenced")
    page.fill("[name=first]", "2")
    page.fill("[name=last]", "2")
    assert count.inner_text() == "20 of 65 tokens"
    page.select_option("[name=order]", "-gradient_norm")
    shown = [
        float(text) for text in page.locator("#tokens td[data-name=gradient]").all_inner_texts()
    ]
    assert shown == sorted(shown, reverse=True)
    assert shown[0] != shown[-1]
    page.fill("[name=text]", "bEFORE WORD4")
    assert (
        count.inner_text() == "5 of 65 tokens"
    )  # of step 2: word4, word40, word43, word46, word49
    page.fill("[name=text]", "no such text")
    assert (count.inner_text(), rows.count()) == ("0 of 65 tokens", 0)


def test_the_page_shows_the_run_and_escapes_its_tokens(make_run, tokens, tmp_path, open_page):
    page = open_page(audit(make_run(tokens=[*tokens, tokens[1]]), tmp_path / "elsewhere"))
    facts = dict(
        zip(*(page.locator(f"dl {tag}").all_inner_texts() for tag in ("dt", "dd")), strict=True)
    )
    assert facts["algorithm"] == "stapo"
    finding = page.locator("h1 + p").inner_text()
    assert finding.startswith("20 % of all tokens were spurious")  # 10, 20 and 30
    assert finding.endswith(
        "S2T silenced them. Their gradient was 20 % of all, counted before any was silenced."
    )
    assert facts["reward, first and last step"] == "1 → 3"
    assert facts["candidates"] == "12, 9 of them spurious; 66 in the token log"
    sections = page.locator(".bars").all()
    assert sections[1].inner_text().split() == ["␣kept", "5"]
    assert len(sections[0].locator("code").all()) == 15
    assert sections[0].inner_text().split()[:4] == ["␣word0", "2", HOSTILE.replace(" ", "␣"), "1"]
    pictures = {path.stem: imread(path) for path in (tmp_path / "elsewhere").glob("*.png")}
    assert set(pictures) == {"reward", "entropy", "silenced", "tau_h", "plane", "gradient"}
    assert pictures["reward"][0, 0, :3].tolist() == [1.0, 1.0, 1.0]
    assert page.locator("#oops").count() == 0
    page.fill("[name=text]", "你好")
    assert page.locator("#tokens mark").inner_text() == HOSTILE
    assert page.locator("#tokens .context").inner_text().strip() == f"{HOSTILE}{HOSTILE}你好"
    assert page.locator("#tokens .alternatives").inner_text() == "0.600 rather⏎this\n0.200 ␣that"


def test_pages_of_runs_without_silencing_candidates_or_token_log(make_run, open_page):
    tokens = [token(1, n, kept=True, spurious=n < 2) for n in range(5)]
    page = open_page(audit(make_run("unsilenced", tokens=tokens, algorithm="justrl")))
    assert "S2T was off" in page.locator("h1 + p").inner_text()
    assert (
        page.locator("section p").all_inner_texts()[0]
        == "STAPO would silence: no token more than once"
    )
    page.select_option("[name=kind]", "STAPO would silence")
    assert page.locator("#count").inner_text() == "2 of 5 tokens"
    folder = make_run("without-candidates", tokens=[])
    lines = [
        line | {"tau_h": None, "tokens": [0] * 4, "points": []}
        for line in read_lines(folder / "quadrants.jsonl")
    ]
    write_lines(folder / "quadrants.jsonl", lines)
    page = open_page(audit(folder))
    assert page.locator("figure").count() == 6
    assert page.locator("#count").inner_text() == "0 of 0 tokens"
    page = open_page(audit(make_run("without-log")))
    assert page.locator("figure").count() == 4
    assert page.locator("form").count() == 0
    assert "log.audit_tokens" in page.locator("body").inner_text()


def drawn(curves, **options):
    axes = Figure().subplots()
    charts.lines(axes, curves, "share", **options)
    return axes


def test_a_logarithmic_chart_leaves_zeros_out():
    curve = Curve("x", [1, 2, 3], [0.1, 0.0, None])
    axes = drawn([curve, curve], log=True)
    assert axes.get_yscale() == "log"
    assert [value == value for value in axes.lines[0].get_ydata()] == [True, False, False]
    assert drawn([Curve("x", [1], [0.0])], log=True).get_yscale() == "linear"
    assert drawn([curve]).lines[0].get_ydata()[1] == 0.0


def test_running_means_leave_out_steps_without_a_value():
    assert charts.running_mean([1.0, None, 3.0, None, None], 2) == [1.0, 1.0, 3.0, 3.0, None]
    assert charts.running_mean([1.0, 2.0, 6.0], 3) == [1.0, 1.5, 3.0]


def test_curves_of_long_runs_are_smoothed():
    steps = range(1, 151)
    values = [float(step % 2) for step in steps]
    raw, smooth = drawn([Curve("x", steps, values)]).lines
    assert list(raw.get_ydata()) == values
    assert min(smooth.get_ydata()[10:]) > 0.3
    assert max(smooth.get_ydata()[10:]) < 0.7
    assert len(drawn([Curve("x", steps[:100], values[:100])]).lines) == 1


def test_a_chart_without_values_says_so():
    axes = drawn([Curve("x", [3, 4, 5], [None] * 3)])
    assert [text.get_text() for text in axes.texts] == ["no values"]
    assert axes.get_xlim() == (3, 6)


def test_frequent_tells_parts_of_a_character_apart():
    tokens = [token(1, n, kept=False, token="\ufffd") for n in (1, 1, 2)]
    assert frequent(tokens) == [("\ufffd #1", 2), ("\ufffd #2", 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/none"], "none: no metrics.jsonl with steps in it; is it a run folder?"),
        (["{tmp}/run", "--out", "/proc/x"], "/proc/x: cannot be written"),
    ],
)
def test_mistakes_are_one_line(make_run, tmp_path, capsys, arguments, message):
    make_run()
    assert command("audit", *(a.format(tmp=tmp_path) for a in arguments)) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error


def test_the_command_prints_the_path_of_the_page(make_run, capsys):
    folder = make_run()
    assert command("audit", folder) == 0
    assert capsys.readouterr().out == f"page: {folder}/audit/index.html\n"
