"""The audit's page in a real browser."""

import shutil
from pathlib import Path

import pytest
from helpers import MINIMAL, command, write_yaml

from stapo_lite.extras.audit.page import audit
from stapo_lite.files import write_lines

MILLISECONDS = 300_000  # a loaded machine takes its time to start a browser
HOSTILE = "</script><b id=oops>$x$"


def token(step, number, **values):
    place = {"probability": 1e-4 * (number + 1), "entropy": 2.0, "tau_h": 2.5, "advantage": 1.5}
    text = {"token": f" word{number}", "before": "Before", "after": " after"}
    norm, best = 1.0 + (number * 7 % 60) / 100, [["rather\nthis", 0.6], [" that", 0.2]]
    known = {"step": step, "kind": "silenced", "gradient_norm": norm, "alternatives": best}
    return known | place | text | values


TOKENS = [token(3, 59, token=HOSTILE, before=HOSTILE, after="你好\n")]
TOKENS += [token(1 + number % 3, number) for number in range(59)]
TOKENS += [token(2, 60 + number, kind="kept", token="7") for number in range(5)]
PLACE = {"probability": 0.9, "entropy": 0.1, "gradient_norm": 0.05, "tau_h": None}
TOKENS += [{"step": 1, "kind": "other"} | PLACE]


@pytest.fixture
def make_run(tmp_path):
    def make(tokens, **changes):
        folder = tmp_path / "run"
        folder.mkdir()
        write_yaml(folder / "config.yaml", MINIMAL | changes)
        shares = ("spurious_share", "spurious_gradient_share")
        metrics = [{"step": step} | dict.fromkeys(shares, 0.1 * step) for step in (1, 2, 3)]
        write_lines(folder / "metrics.jsonl", metrics)
        write_lines(folder / "tokens.jsonl", tokens)
        return folder

    return make


@pytest.fixture(scope="module")  # the driver's event loop must not outlive these tests
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("no Chromium on the PATH")
    options = {"args": ["--no-sandbox", "--disable-gpu"], "timeout": MILLISECONDS}
    with playwright.sync_playwright() as p:
        yield p.chromium.launch(executable_path=executable, **options)


@pytest.fixture
def open_page(browser):
    """Pages must not complain and must not ask the network."""
    complaints = []

    def open_(path, width=1200):
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.set_default_timeout(MILLISECONDS)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url))
        page.goto(path.resolve().as_uri())
        return page

    yield open_
    assert [text for text in complaints if not text.startswith(("file:", "data:"))] == []


def test_the_table_is_filtered_and_ordered(make_run, open_page):
    page = open_page(audit(make_run(TOKENS)))
    count, rows = page.locator("#count"), page.locator("#tokens tbody tr")
    assert (count.inner_text(), rows.count()) == ("65 of 65 tokens", 50)
    page.click("#more")
    assert rows.count() == 65
    page.select_option("[name=kind]", "kept")
    assert page.locator("#tokens mark").all_inner_texts() == ["7"] * 5
    page.select_option("[name=kind]", "silenced")
    page.fill("[name=first]", "2")
    page.fill("[name=last]", "2")
    assert count.inner_text() == "20 of 65 tokens"
    page.select_option("[name=order]", "-gradient_norm")
    texts = page.locator("#tokens td[data-name=gradient]").all_inner_texts()
    assert texts == sorted(texts, key=float, reverse=True) != texts[::-1]
    page.fill("[name=text]", "bEFORE WORD4")
    assert count.inner_text() == "5 of 65 tokens"  # word4, word40, word43, word46, word49


@pytest.mark.parametrize("width", [1400, 900, 400])
def test_the_page_fits_screens_and_escapes_its_tokens(make_run, tmp_path, open_page, width):
    page = open_page(audit(make_run([*TOKENS, TOKENS[1]]), tmp_path / "elsewhere"), width)
    charts = page.eval_on_selector_all("figure", "all => all.map(f => f.id)")
    assert charts == ["plane", "reward", "entropy", "silenced", "tau_h"]
    boxes = page.eval_on_selector_all("figure", "all => all.map(f => f.getBoundingClientRect())")
    rights = [box["right"] for box in boxes]
    assert rights[-1] == pytest.approx(max(rights))  # the last row of the grid has no hole
    loaded = "all => all.every(i => i.complete && i.naturalWidth > 400)"
    assert page.eval_on_selector_all("img", loaded)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    finding = page.locator("h1 + p").inner_text()
    assert finding.startswith("20.000% of all tokens were spurious")  # 10, 20 and 30
    assert "S2T was on (silence=low-entropy). Their gradient was 20.00% of all" in finding
    page.fill("[name=text]", "你好")
    assert page.locator("#tokens .context").inner_text().strip() == f"{HOSTILE}{HOSTILE}你好"
    assert page.locator("#tokens .alternatives").inner_text() == "0.600 rather⏎this\n0.200 ␣that"
    assert page.locator("#oops").count() == 0


@pytest.mark.parametrize(("tokens", "figures"), [(TOKENS[-1:], 5), ([], 4)])
def test_a_page_without_candidates_or_token_log(make_run, open_page, capsys, tokens, figures):
    assert command("audit", make_run(tokens, algorithm="justrl")) == 0
    page = open_page(Path(capsys.readouterr().out.strip().removeprefix("page: ")))
    assert "S2T was off" in page.locator("h1 + p").inner_text()
    assert page.locator("figure").count() == figures
    assert page.locator("#count").all_inner_texts() == ["0 of 0 tokens"] * len(tokens)
    assert page.get_by_text("log.audit_tokens=0").count() == (not tokens)


def test_the_plane_is_cut_at_the_runs_thresholds(make_run, monkeypatch):
    cut = []
    draw = lambda _, *thresholds: cut.append(thresholds) or b""  # noqa: E731
    monkeypatch.setattr("stapo_lite.extras.audit.page.plane", draw)
    audit(make_run(TOKENS, objective={"s2t": {"tau_p": 0.25}}))
    assert cut == [(0.25, 2.5)]
