import pytest
from helpers import shared_data

from stapo_lite.extras.math.answers import canonical, equivalent, final_answer
from stapo_lite.extras.math.grading import grade_file
from stapo_lite.extras.math.spelling import SPELLINGS, rewrite
from stapo_lite.files import read_lines


@pytest.mark.parametrize(
    ("answer", "responses"),
    [
        (r"\frac{1}{2}", [r"a \boxed{1} b \boxed{\frac{1}{2}}"]),
        (r"\frac{1}{2}", [r"The final answer is $\frac{1}{2}$. I hope it is correct."]),
        ("3", [r"\boxed {3}", r"\fbox{3}"]),
        ("1", [r"\boxed{1} then \boxed{2"]),
        ("42", [r"it is \boxed{41}. No, \boxed{42}"]),
        ("4", [r"first \boxed{5}, no: \boxed{4}", "The answer is that x is even and it is 4."]),
        (
            "4",
            [r"<think>\boxed{3}, or</think> it is \boxed{4}", "reasoning </think> the answer is 4"],
        ),
        ("7", [r"\boxed{\boxed{7}}", r"\boxed{7}, so \boxed{7}"]),
        (r"\frac12, 0.5", [r"\boxed{\frac12} or \boxed{0.5}"]),
        ("5", [r"\boxed{5} \boxed{}", r"\\boxed{5}", r"Put it in \boxed{}. The answer is 5."]),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", [r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"]),
        (r"\{1,2\}", [r"\boxed{\{1,2\}}"]),
        (r"f(x)=\left\{x\right.", [r"\boxed{f(x)=\left\{x\right.}"]),
        (r"\frac34", ["the answer is\n$$\n\\frac34\n$$"]),
        ("(1, 2)", ["The answer is (1, 2)."]),
        ("B", ["Answer: B"]),
        (".25", ["The answer is .25", "**Answer:** .25."]),
        ("4.5e3", ["the answer is 4.5e3"]),
        ("-2, 1", [r"$\boxed{-2}$ and $\boxed{1}$."]),
        (
            "3, 4",
            [r"\(x_1 = \boxed{3}\), \quad \(x_2 = \boxed{4}\)", r"\boxed{3} \text{ or } \boxed{4}"],
        ),
        ("12", ["The total is 15 and the final answer is 12."]),
        ("1000.99", ["So the cost is $1,000.99 in all, done."]),
        ("7425", ["#### 7,425"]),
        ("x = 5", ["**Answer:** $x = 5$"]),
        ("99", ["总共有99颗弹珠"]),
        ("3/4", ["3/4"]),
        (
            None,
            [
                r"<think>\boxed{4}</think>",
                r"<think> so \boxed{4}, and now I check",
                "I do not know",
                r"\boxed{}",
            ],
        ),
        (None, [""]),
    ],
)
def test_the_final_answer(answer, responses):
    assert {response: final_answer(response) for response in responses} == dict.fromkeys(
        responses, answer
    )


GSM8K = "48 / 2 = <<48/2=24>>24 clips in May,\n48 + 24 = 72 in all.\n#### 72"
ERGS = r"4.5\cdot10^{33} \mathrm{~erg} / \mathrm{s}"
FIELD = r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}"
MOTION = r"m \frac{d v}{d t}+b v=f"
WAVE = r"\lambda_{\text {red}} / \sqrt{2}"
RESPONSE = r"\frac{2-\omega^{2}-\omega i / 4}{\omega^{4}-\frac{63}{16} \omega^{2}+4}"
# pairs of a gold and an answer
EQUAL = {
    "ends of solutions": [(GSM8K, "72"), ("#### 1,000", "1000")],
    "e-notation": [
        ("4.5e33", r"4.5 \times 10^{33}"),
        ("1e-5", "0.00001"),
        ("2.7778e-6", "2.7778*10^-6"),
    ],
    "e-notation by x": [("1.04e-3", "1.04 x 10^-3")],
    "e-notation with units": [("4.5e33", ERGS), ("4.5e33", "4.5e33 erg/s")],
    "powers with units": [("3.3e12", r"3.3 \times 10^{12} \mathrm{erg\ s^{-1}}")],
    "fractions": [
        ("-3./2", r"-\frac{3}{2}"),
        (r"\frac 59", r"\dfrac{5}{9}"),
        (r"\frac{1}{2}", r"\dfrac{1}{2}"),
    ],
    "decimals of fractions": [(r"\frac{1}{12}", "0.0833333333333333"), (r"\frac{1}{2}", "0.5")],
    "signs that are no LaTeX": [
        ("x^2", "x²"),
        (r"2\sqrt{3}", "2√3"),
        (r"\sqrt{x+1}", "√(x+1)"),
        (r"(-\infty, 3]", "(-∞, 3]"),
        ("3.5", "3½"),
        ("1000", "1\N{NARROW NO-BREAK SPACE}000"),
        ("5", "\N{ZERO WIDTH SPACE}5"),
    ],
    "mixed numbers": [(r"1\frac{4}{5}", "1.8"), (r"137 \frac12", "137 1/2")],
    "thousands": [(r"\$32,\!348", "32348"), (r"10,\!080", "10{,}080"), ("1 000 000", "1,000,000")],
    "per cent and degrees": [(r"28\%", "28"), (r"28\%", "0.28"), (r"90^\circ", "90")],
    "per cent with decimals": [
        ("17.5%", "17.5"),
        ("17.5%", "0.175"),
        ("12.5", r"12.5\%"),
        (r"8 \%", "8.0"),
    ],
    "fractions of commands": [(r"\frac{\pi}{4}", r"\frac\pi4"), (r"\frac{1}{\pi}", r"\frac1\pi")],
    "points with fractions": [
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac\pi2)"),
        (r"\frac{a}{2}", r"\frac a2"),
    ],
    "fractions of Greek letters": [
        (r"\frac{\alpha}{2}", r"\frac\alpha2"),
        (r"\frac{2}{\omega}", r"\frac 2\omega"),
    ],
    "Greek labels": [
        ("11.2", r"\theta \approx 11.2^\circ"),
        ("589", r"\lambda \approx 589 \text{ nm}"),
    ],
    "Greek formulas": [
        (r"2 \pi / \omega", r"\frac{2\pi}{\omega}"),
        (WAVE, r"\frac{\lambda_{\text{red}}}{\sqrt{2}}"),
    ],
    "units": [
        (r"864 \mbox{ inches}^2", "864"),
        ("5.4", r"5.4 \text{ cents}"),
        ("310", "310 K"),
        ("10", "10 m/s^2"),
    ],
    "units in words": [
        ("45", "45 minutes"),
        ("125", "125 miles"),
        ("125 miles", "125"),
        ("1.6", "1.6cm"),
    ],
    "units of physics": [("9.81", r"9.81 \, \mathrm{m/s^{2}}"), ("5", r"5 \mathrm{~W~m^{-2}}")],
    "words and choices": [(r"\text{Evelyn}", "evelyn."), (r"\text{(C)}", "C")],
    "labels": [("x=5", "5"), ("(p,q)=(3,2)", "(3,2)"), ("f(x)=2x", "2x")],
    "approximations": [("1/3", r"x = \frac{1}{3} \approx 0.33"), ("5", r"\approx 5")],
    "domains": [
        ("f(n)=n", r"f(n)=n \text{ for all } n \in \mathbb{N}"),
        ("f(n)=n", r"f(n)=n, \forall n"),
    ],
    "integers": [(r"2\pi k", r"2k\pi, k \in \mathbb{Z}")],
    "intervals": [
        (r"x \in [-2,7]", "[-2,7]"),
        (r"x \in [-2,7]", r"-2\le x\le7"),
        ("-2 < x < 7", "(-2,7)"),
    ],
    "half lines": [
        (r"(5,\infty)", "x>5"),
        (r"(-\infty,0]", r"x\le0"),
        (r"k \geqslant 2", r"2 \le k"),
    ],
    "lists": [("1 or 2", "2 and 1"), ("(1,1), (3,2)", "(3,2),(1,1)"), ("a=1, b=2", "b=2, a=1")],
    "sets": [(r"\{1,2,3\}", r"\{3,1,2\}"), (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}")],
    "vectors": [
        (
            r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}",
            r"\begin{bmatrix} -\frac13 \\ \frac23 \end{bmatrix}",
        )
    ],
    "heights of rows": [
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\[4pt]2\end{pmatrix}")
    ],
    "points": [(r"\left( 3, \frac{\pi}{2} \right)", r"(3, \frac{\pi}{2})")],
    "bases, roots, pi": [
        ("52_8", "52_{8}"),
        (r"11\sqrt2", r"11 \sqrt{2}"),
        (r"\frac{2\pi}{3}", r"2/3 \pi"),
    ],
    "functions of numpy": [("np.arcsin(10/13)", r"\arcsin\left(\frac{10}{13}\right)")],
    "complex numbers": [
        (r"-8-8 \sqrt{3} i", r"-8-8i\sqrt3"),
        (r"1+\sqrt{3} i", r"1+i\sqrt{3}"),
        ("2+3i", "3i+2"),
    ],
    "complex logarithms": [(r"\ln 2 + i\pi / 3", r"\ln 2+\frac{i\pi}{3}")],
    "complex functions": [(r"\frac{e^{2 i t}}{(2+2 i)}", r"\frac{e^{2it}}{2+2i}")],
    "complex denominators": [(r"\frac{e^{2 i t}}{(2+2 i)}", r"\frac{1-i}{4}e^{2it}")],
    "responses": [
        (RESPONSE, r"\frac{2-\omega^2-\frac{i\omega}{4}}{4-\frac{63}{16}\omega^2+\omega^4}")
    ],
    "orders of terms": [
        ("a + b + c", "c+b+a"),
        ("1 - t", "-t+1"),
        ("2x+4y-3=0", r"y=-\frac{1}{2}x+\frac{3}{4}"),
    ],
    "fractions of letters": [(r"\frac{K-1}{L}", "(K-1)/L"), (r"\frac1m t", r"\frac tm")],
    "fractions with roots": [(r"\frac1{\sqrt2}c", r"\frac c{\sqrt2}")],
    "subscripts": [(FIELD, r"\frac{E_1+2E_2}{3}")],
    "derivatives": [
        (MOTION, r"b v + m\frac{dv}{dt} = f"),
        (r"y^{\prime}+r y-r x(t)=0", "y' + ry - r x(t) = 0"),
    ],
    "notations of derivatives": [
        (MOTION, r"m\dot{v}+bv=f"),
        (MOTION, "mv' + bv = f"),
        (MOTION, r"m\dot v + bv = f"),
    ],
    "second derivatives": [
        (r"\ddot{x}+x=0", r"\frac{d^2x}{dt^2}+x=0"),
        (r"\ddot{x}+x=0", "x''+x=0"),
    ],
    "powers of letters": [(r"\frac{a M^{1 / 3}}{G M^{2 / 3}+b}", r"\frac{aM^{1/3}}{GM^{2/3}+b}")],
    "choices with their values": [
        ("27", r"\textbf{(B)}\ 27"),
        ("C", r"\text{(C) } 12"),
        ("-5", "(A) -5"),
    ],
    "repeating decimals": [
        (r"\frac{1}{3}", r"0.\overline{3}"),
        ("1/6", r"0.1\overline{6}"),
        ("-12/11", r"-1.\bar{09}"),
    ],
    "styles": [
        ("12", r"\Large 12"),
        ("12", r"\color{blue}{12}"),
        ("13", r"\bf 13"),
        ("12", r"12 \rm cm"),
    ],
    "full width": [("(1,2)", "\uff081\uff0c2\uff09"), ("1,2", "1\u30012"), ("-5", "\u20135")],
    "signs of lists and sets": [("x=1 or x=2", r"x=1 \lor x=2"), (r"\emptyset", r"\varnothing")],
    "per cent on both sides": [("62.5%", r"62\frac12\%")],
    "lists of approximations": [(r"\frac13, \frac25", r"\frac13 \approx 0.333, \frac25 = 0.4")],
    "lists of functions": [
        ("f(n)=n, f(n)=0", r"f(n)=n \text{ for all } n \text{ and } f(n)=0 \text{ for all } n")
    ],
    "units of astronomy": [("12", r"12 \mathrm{~L}_{\odot}")],
    "constants": [(r"\hbar \omega(v+1 / 2)", r"\hbar\omega(v+\frac12)")],
}
TINY = ("0", "x = 0", "3e-7", "0.0000001", r"\lambda \approx 4 \times 10^{-9} \text{ m}")
DIFFERENT = {
    "signs that are no LaTeX": [("x^3", "x²"), ("2", "√2"), (r"\sqrt{12}", "√1")],
    "ends of solutions": [(GSM8K, "24")],
    "e-notation": [
        ("4.5e33", "4.6e33"),
        ("4.5e33", "4.5e32"),
        ("1e-8", "2e-8"),
        ("0.0000001", "0.0000002"),
    ],
    "small numbers": [(tiny, answer) for tiny in ("2.88e-19", "1e-8") for answer in TINY],
    "digits": [
        ("3986729", "3986730"),
        ("16386.20", "16386.21"),
        ("1.6", "1.64"),
        ("2^{1009}", "2^{1009}+1"),
    ],
    "decimals": [
        (r"\frac{1}{3}", "0.33"),
        (r"\frac{1}{3}", "0.333"),
        (r"\frac12", "0.5000001"),
        (r"\sqrt{2}", "1.5"),
    ],
    "decimals of constants": [
        (r"\pi", "3.1416"),
        (r"100\pi", "314.16"),
        (r"\ln 2", "0.69315"),
        ("25", ".25"),
    ],
    "several values": [
        ("5", r"5 \text{ or 6}"),
        ("5", r"5 \text{ or more}"),
        ("5", r"5\text{, 6}"),
        ("7", r"7 \text{ boys}, 8 \text{ girls}"),
        ("2", r"2 \text{ hours } 30 \text{ minutes}"),
        (r"\frac13", r"\frac13 \approx 0.33, \frac25"),
        ("5", r"x \approx 4, y \approx 5"),
    ],
    "several functions": [
        ("f(x)=x", r"f(x)=x \text{ for all } x \text{ and } f(x)=0 \text{ for all } x"),
        ("2", r"2 \text{ for all odd } n, 3 \text{ for all even } n"),
    ],
    "order of labels": [("x=1, y=2", "2, 1")],
    "several choices": [("D", "(C) (D)"), ("27", r"\textbf{(B)}\ 28")],
    "rounded integers": [("142857", "1000000/7"), ("333333", r"\frac{1000000}3"), ("16", "32/3")],
    "decimals of powers": [("10^{7}", "10000001.0"), ("2^{20}", "1048577.0")],
    "signs": [("-5", "5"), (r"\frac{1}{2}", r"-\frac{1}{2}"), (r"\pm 2021", "2021")],
    "per cent": [("28/100", "28"), (r"28\%", r"0.28\%"), ("17.5%", "17.6"), ("17.5%", "1.75")],
    "Greek letters": [
        (r"2 \pi / \omega", r"2\pi/\Omega"),
        (r"-\tau \ln \Delta", r"-\tau\ln\delta"),
        (r"\omega", r"\Omega"),
    ],
    "Greek subscripts": [
        (WAVE, r"\frac{\lambda_{\text{blue}}}{\sqrt{2}}"),
        (r"\frac{\pi}{4}", r"\frac\pi3"),
    ],
    "spaces": [
        ("32349", "32, 349"),
        ("11/2", "1 1/2"),
        ("56", "5 6"),
        ("12", r"1\,2"),
        ("8/9", "4 4/9"),
    ],
    "counts": [("1,1,2", "1,2"), ("7", "7, 7"), ("42", "41 or 42"), ("42", ""), ("C", "(C) (D)")],
    "brackets": [("(1,2)", "(2,1)"), ("(3,4]", "(3,4)"), ("1,2", "(1,2]"), (r"x\in[-2,7]", "-2,7")],
    "commas": [("(2,251,252)", "2251252"), ("(1,234)", "1234"), ("(1,5)", "1.5")],
    "infinity": [(r"(-\infty, 0]", r"(\infty, 0]"), ("D = (0, 1)", "D = (0, 1.5)")],
    "bases and times": [("52_8", "52_9"), ("52_8", "52"), ("12:00", "1:00")],
    "labels": [("x=5", "6"), ("a=1, b=2", "a=2, b=1"), ("N=n", "N=n+1"), ("a^2 + b = 0", "0")],
    "words and choices": [(r"\text{even}", r"\text{odd}"), ("C", "(B) 12"), ("E", r"\mathrm{E}*2")],
    "functions": [("np.arcsin(10/13)", r"\arcsin(11/13)")],
    "capitals": [("kT", "kt"), ("mR^2", "mr^2")],
    "capitals and fractions": [
        (r"\frac{25}{2}R", r"\frac{25}{2}r"),
        (r"\frac{E_1}{2}", r"\frac{e_1}{2}"),
    ],
    "subscripts": [(FIELD, r"\frac{1}{4} E_{1}+\frac{2}{3} E_{2}"), ("c_1+c_2 t", "c_1+c_2")],
    "powers": [(r"m_{p} c^{2}\left(\gamma^{2}-1\right)", r"m_{p} c^{2}\gamma^{2}")],
    "derivatives": [(MOTION, r"m \frac{d w}{d t}+b v=f"), ("f'", "f"), ("y'+ry=0", "y+ry=0")],
    "orders of derivatives": [
        (MOTION, r"m\ddot{v}+bv=f"),
        (r"\frac{d^2x}{dt^2}", r"\frac{d^2x}{dt^1}"),
    ],
    "variables of derivatives": [
        (r"\frac{dM}{dr}", r"\frac{dM}{dt}"),
        (r"\frac{dM}{dr}", r"\dot{M}"),
    ],
    "letters that are no units": [("$6m$", "6"), ("5m", "5"), ("x + 5", "x + 5 m")],
    "letters behind fractions": [(r"\frac{37}{4} m", r"\frac{37}{4}"), (r"\frac1m t", r"\frac1m")],
    "factors": [
        ("2ab", "2"),
        ("2 xyz", "2"),
        (r"\frac12 abc", r"\frac12"),
        ("4h^2", "4"),
        (r"2\pi r h", r"2\pi r"),
    ],
    "terms and factors": [
        ("2a+3h", "2a+3"),
        (r"\frac{1}{\sqrt2}c", r"\frac1{\sqrt2}"),
        ("2", "2x"),
    ],
}


@pytest.mark.parametrize("rule", SPELLINGS, ids=lambda rule: rule[2])
def test_a_rule_turns_its_example_into_the_result(rule):
    *_, example, result = rule
    assert rewrite(example, [rule]) == result


@pytest.mark.parametrize("kind", EQUAL)
def test_equal(kind):
    for gold, answer in EQUAL[kind]:
        assert equivalent(gold, answer), (gold, answer)
        assert equivalent(gold, f"${answer}$."), (gold, answer)


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different(kind):
    assert [pair for pair in DIFFERENT[kind] if equivalent(*pair)] == []


def test_the_order_of_a_list_counts_where_the_benchmark_says_so():
    assert equivalent("1,3,5", "5, 1, 3", ordered=False)
    assert not equivalent("16,3,1,1", "16,3,1", ordered=False)
    assert not equivalent("1,1,2", "1,2,2", ordered=False)
    assert not equivalent("(1,2)", "(2,1)", ordered=False)
    assert equivalent("10, 4, -2", "4, 10, -2")
    assert not equivalent("10, 4, -2", "4, 10, -2", ordered=True)
    assert not equivalent("(1,2), 5, 3", "(1,2), 3, 5", ordered=True)


def test_the_tolerance_is_absolute():
    assert equivalent("4.2", "4.15", tolerance=0.1)
    assert not equivalent("4.2", "4.35", tolerance=0.1)
    assert equivalent("1.68,0.45", "0.46, 1.7", ordered=False, tolerance=0.02)
    assert equivalent("3.1", r"\pi", tolerance=0.05)
    assert not equivalent("3.1", r"\pi", tolerance=0.04)


def test_one_spelling_for_votes():
    assert {canonical(text) for text in (r"\dfrac12", "1/2", "0.5", r"$\frac{1}{2}$.", ".50")} == {
        "1/2"
    }
    assert canonical(r"x^{2} + 1") == canonical("x^2+1") != canonical("x^2+2")


def test_cases_of_other_projects_own_suites(tmp_path):
    """The labels that begin with `policy` are choices, and so is the order of a plain list."""
    grade_file(
        shared_data("verify_cases"), tmp_path / "verdicts.jsonl", timeout=20.0, num_workers=2
    )
    cases = [
        case
        for case in read_lines(tmp_path / "verdicts.jsonl")
        if not case.get("note", "").startswith("policy")
    ]
    assert sum(case["correct"] == case["equal"] for case in cases) >= 0.985 * len(cases)
    order = "order-sensitive list semantics"
    assert [c for c in cases if c["correct"] and not c["equal"] and c.get("note") != order] == []
