"""Answers of math problems, by hand: which one of a response counts, which ones are equal."""

from contextlib import closing

import pytest
from helpers import ROOT, shared_data
from math_verify import parse, verify

from stapo_lite.extras.math.answers import equivalent, final_answer, grade
from stapo_lite.extras.math.grading import MathGrader, Question
from stapo_lite.extras.math.rules import NUMBERS, SPELLINGS, SYMBOLS, rewrite
from stapo_lite.files import read_lines
from stapo_lite.rewards.sandbox import Pool

SHARED_CASES = sorted((ROOT.parent / "shared/cases").glob("grading_*.jsonl"))


def right(gold, response):
    return grade(gold, response, True, False, 0.0)[0]


FINAL = {
    r"\frac{1}{2}": [r"a \boxed{1} b \boxed{\frac{1}{2}}"],
    "4": [r"it is \boxed{5}. No, \boxed{4}", "The answer is 4", r"\boxed{\boxed{4}}", r"\fbox{4}"],
    "3": [r"\boxed {3}", r"<think>\boxed{2}</think> \boxed{3}", "so </think> the answer is 3"],
    "1": [r"\boxed{1} then \boxed{2", r"\boxed{1} \boxed{}", r"\\boxed{1}"],
    "7": [r"\boxed{7}, so \boxed{7}", "[THINK]6[/THINK]7", "<thinking>6</thinking>#### 7\nand 8"],
    "-2, 1": [r"$\boxed{-2}$ and $\boxed{1}$.", r"$x_1=\boxed{-2}$, \quad $x_2=\boxed{1}$"],
    r"\{1,2\}": [r"\boxed{\{1,2\}}"],
    r"f(x)=\left\{x\right.": [r"\boxed{f(x)=\left\{x\right.}"],
    r"$\frac34$": [r"the answer is $\frac34$. I hope it is correct.", r"So $\frac34$ is left."],
    "(1, 2)": ["The answer is (1, 2).", "**Answer:** (1, 2)", "The point is (1, 2)."],
    "12": ["<answer>12</answer>", "The total is 15 and the final answer is 12.", "12 boys"],
    "1 or 2": ["x = 1 or 2", "The answer is 1 or 2."],
    "E": ["Of 5 choices it has to be\n\nE."],
    "B": ["Answer: B", "<answer> B </answer>", "The correct option is B because A is small."],
    "A and C": ["The correct options are A and C."],
    "99": ["总共有99颗弹珠"],
    None: [r"<think>\boxed{4}</think>", r"<think> \boxed{4}, now I check", "I do not know", ""],
}


@pytest.mark.parametrize("answer", FINAL)
def test_the_final_answer_of_a_response(answer):
    found = {response: final_answer(response) for response in FINAL[answer]}
    assert found == dict.fromkeys(FINAL[answer], answer)


def test_of_a_response_that_was_cut_off_only_a_box_or_an_answer_in_tags_counts():
    responses = ["The answer is 4", "<answer>4", "<answer>4</answer> and", r"\boxed{4} so"]
    found = [final_answer(response, finished=False) for response in responses]
    assert found == [None, None, "4", "4"]


# pairs of a gold and a response
RIGHT = [
    ("<answer>C</answer>", "<think>so</think><answer>C</answer>"),
    ("<answer> x = 7 </answer>", "7"),
    ("<Final_Answer>7</Final_Answer>", "<SOLUTION>7</SOLUTION>"),
    ("<solution>3/8</solution>", r"\boxed{0.375}"),
    ("= 7", r"\boxed{7}"),
    (r"\sqrt[3]{6}", r"\boxed{\sqrt[3]6}"),
    (r"\emptyset", r"\boxed{\{\}}"),
    ("3/5", r"\boxed{3⁄5}"),  # noqa: RUF001
    (r"5^3 \cdot 13", r"\boxed{5^3 13}"),
    ("3^2 7^4", r"\boxed{3^2 \cdot 7^4}"),
    ("12", "<think>3*4</think>\n<answer>\n12 apples\n</answer>"),
    ("1/2", r"<answer>\boxed{\frac12}</answer>"),
    ("C", "<SOLUTION>(C)</SOLUTION> User: 15"),
    ("13", "<answer>12</answer>, no: <answer>13</answer>"),
    ("42", "#### 42\nI hope this helps with your 3 questions!"),
    ("58", "The number is **58**.\n\n---\n\n**Check:** done"),
    ("58", "The answer is 58, not 60."),
    ("C", "Therefore, the answer is (C) 12, because (A) is too small."),
    ("7", "Answer: 28 students / 4 = 7 students per class"),
    ("3/4", "The probability is 3/4, or 75%."),
    ("2/3", r"The probability is \frac{2}{3} ≈ 0.67."),
    ("no solution", "The answer is: no solution."),
    ("12", "The final answer is therefore $12$."),
    ("3.14", "Answer: approximately 3.14"),
    ("18", "The answer is 18. I am sure that the answer is correct."),
    ("14", "\\[\nboxed{14}\n\\]"),
    ("(5, 6)", "So $x = 5$ and $y = 6$."),
    ("48 + 24 = 72\n#### 72", r"\boxed{72}"),
    (r"so it is \boxed{72}", "72"),
]
WRONG = [
    ("<answer>C</answer>", "<answer>B</answer>"),
    ("E", r"\boxed{e}"),
    (r"\sqrt[3]{6}", r"\boxed{\sqrt[3]7}"),
    ("12", "<think><answer>12</answer></think><answer>13</answer>"),
    ("12", "<think>12"),
    ("60", "The answer is 58, not 60."),
    ("C", "The answer is (C). Wait, with $x = 2$ it is too small"),
    ("2", "AZYUK2A"),
    ("3", "It could be 1, 2, or 3."),
    ("3/4", "The probability is 3/4, or 80%."),
    ("A", r"\boxed{A} or \boxed{B}"),
    ("B", r"\boxed{A}, \boxed{B}"),
    ("3", "\\boxed{1}\n\\boxed{2}\n\\boxed{3}"),
    ("1", r"\boxed{1}. So it is \boxed{2}."),
]
GUESSES = r"""1, 2, 3, 4|x = 1 or 2 or 3|1\quad2\quad3|x\in\{1,2,3\}|[1,3]|1 3|3 \lor 5|3 & 4|3 3
|1 \\ 2 \\ 3|\text{either } 3 \text{ or } 4|3 \text{ or more}|2 < x < 3|3; 4|1, \ldots, 3|3, 3"""


def test_right_and_wrong_responses():
    assert [pair for pair in RIGHT if not right(*pair)] == []
    assert [pair for pair in WRONG if right(*pair)] == []


def test_an_answer_that_lists_guesses_is_wrong():
    assert [guess for guess in GUESSES.split("|") if right("3", rf"\boxed{{{guess}}}")] == []


# pairs of a gold and an answer
EQUAL = {
    "numbers": [("4.5e33", r"4.5 \times 10^{33}"), ("1e-5", "0.00001"), ("-3./2", r"-1\frac12")],
    "fractions": [(r"\frac 59", r"\dfrac{5}{9}"), ("137 \\frac12", "137.5"), ("0.5", "2/4")],
    "thousands": [(r"\$32,\!348", "32348"), ("1 000 000", "1,000,000"), ("5 million", "5e6")],
    "money": [("50", "€50"), ("50", "£ 50.00"), (r"\$18.90", "18.9"), ("50", "50 dollars a day")],
    "per cent": [("17.5%", "17.5"), ("17.5%", "0.175"), ("12.5", r"12.5\%"), ("3/4", "75 pct")],
    "units": [(r"15 \mbox{ cm}^2", "15"), ("9", r"9 \, \mathrm{m/s^{2}}"), ("310", "310 K")],
    "units of physics": [("4e33", r"4\cdot10^{33} \mathrm{~erg} / \mathrm{s}"), ("90", "90°")],
    "compound units": [("8.64", r"8.64 \text{ g} \cdot \text{cm}^{-3}"), ("12", "12 per day")],
    "temperatures": [("800", r"800^\circ\text{C}"), ("25", "25°F"), ("90", r"90\degree")],
    "decimals": [("1/3", "0.333333"), (r"\pi", "3.14159"), ("1.41421", r"\sqrt2")],
    "repeating decimals": [("1/6", r"0.1\overline{6}"), ("-12/11", r"-1.\bar{09}")],
    "exact values": [("2^{-60}", r"\frac{1}{2^{60}}"), (r"\frac{1}{20!}", "1/2432902008176640000")],
    "roots": [(r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt3}{3}"), (r"0.1\pi", r"\frac{\pi}{10}")],
    "signs": [("x^2", "x²"), (r"2\sqrt{3}", "2√3"), (r"(-\infty, 3]", "(-∞, 3]"), ("3.5", "3½")],
    "relations": [(r"\le 5", "≤ 5"), (r"\geq 3", "≥3"), (r"(5,\infty)", "x>5"), ("x<3", "3>x")],
    "words": [("Yes", r"\text{yes}"), ("No", "NO."), (r"\text{Evelyn}", "evelyn"), ("odd", "Odd")],
    "infinity": [("infinity", r"\infty"), (r"-\infty", "-∞"), (r"(1,\infty)", r"(1,+\infty)")],
    "prose": [("12", r"\text{The answer is } 12"), ("12", "The total is 12 apples")],
    "choices": [("C", "C. 12"), ("C", "(C) Paris"), ("C", r"\text{Option C}"), ("12", "(C) 12")],
    "choices as golds": [(r"\textbf{(C)}\ 12", "C"), (r"\textbf{(C)}\ 12", "12"), ("(C)", "C")],
    "several choices": [("A, C", r"\text{A and C}"), ("A, C", "(C), (A)"), ("A and C", "A,C")],
    "labels": [("x=5", "5"), ("f(x)=2x", "2x"), ("5", "z = 2+3 = 5")],
    "labels of letters": [("N=n", "n"), (r"m_{\text{max}}=n^2-n", "n(n-1)")],
    "labels of tuples": [("(p,q)=(3,2)", "(3,2)"), ("(3,2), (1,8)", "(p,q)=(3,2) or (p,q)=(1,8)")],
    "rounded": [("1/3", r"x = \frac13 \approx 0.33"), ("11.2", r"\theta \approx 11.2^\circ")],
    "rounded behind a unit": [
        (r"12\pi", r"12\pi \text{ cm}^2 \approx 37.7 \text{ cm}^2"),
        ("1657", r"1,657 \approx 1700"),
    ],
    "lists": [("1 or 2", "2 and 1"), ("a=1, b=2", "b=2, a=1"), ("(1,1), (3,2)", "(3,2),(1,1)")],
    "sets": [(r"\{1,2\}", "2, 1"), (r"1 \pm \sqrt{9}", r"1-\sqrt{9}, 1+\sqrt{9}"), ("3", "{3}")],
    "tuples": [("(3,2)", "x=3, y=2"), ("(2,251,252)", "(2, 251, 252)"), ("(1, 0.5)", "(1, 1/2)")],
    "domains": [("f(n)=n", r"f(n)=n \text{ for all } n"), (r"2\pi k", r"2k\pi, k \in \mathbb{Z}")],
    "formulas": [("(x+1)^2", "x^2+2x+1"), ("2x+4y-3=0", r"y=-\frac{1}{2}x+\frac{3}{4}")],
    "capitals": [(r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}", r"\frac{E_1+2E_2}{3}")],
    "complex numbers": [(r"1+\sqrt{3} i", r"1+i\sqrt{3}"), (r"\frac{1}{2+2 i}", r"\frac{1-i}{4}")],
    "derivatives": [(r"m \frac{d v}{d t}+b v=f", r"m\dot{v}+bv=f"), (r"y^{\prime}", "y'")],
    "second derivatives": [(r"\frac{d^2 \theta}{d t^2}+b v_o", r"\ddot{\theta}+bv_o")],
    "derivatives with an index": [(r"\dot{x}_{0} / \omega", r"\frac{\dot{x}_0}{\omega}")],
    "constants of integration": [(r"\frac{e^{t}}{3}+c e^{-2t}", r"\frac13 e^t + Ce^{-2t}")],
    "bases": [("52_8", "52_{8}"), ("1001_2", "(1001)_2"), ("101_2", "101_{(2)}"), ("7", "7_{10}")],
    "residues": [("9", r"x \equiv 9 \pmod{11}"), ("9", "9 (mod 11)")],
    "ordinals": [("12", r"12^{\text{th}} \text{ grade}"), ("3", "3rd place")],
    "conditions": [
        ("2/s", r"A = \frac{2}{s}, \quad \text{for } s>0"),
        ("n", r"n \text{ where } n>0"),
    ],
    "numbers behind a fraction": [
        (
            r"\begin{pmatrix}16/49\\48/49\end{pmatrix}",
            r"\frac{1}{49}\begin{pmatrix}16\\48\end{pmatrix}",
        ),
        (r"\frac{20!}{2^{10}\cdot 10!}", r"\frac{20!}{2^{10} 10!}"),
        (r"\log_{10} 5", r"\frac{\log_{10} 25}{2}"),
        ("150000", r"\frac{3}{2} 10^5"),
        ("15.75", r"\frac{3}{2} 10.5"),
    ],
    "unions": [
        (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>3"),
        (r"(-\infty,0)\cup\{1\}", r"k<0 \text{ or } k=1"),
    ],
    "lengths of physics": [("6630", r"6630\ \AA"), ("50", r"50\ \mu\text{m}"), ("2e3", "2E+3")],
    "cents": [(r"5.4 \text{ cents}", "5.4¢"), ("75", r"75\cent")],
    "units in a fraction": [
        ("300", r"300 \frac{\text{km}}{\text{s}}"),
        ("4e13", r"4\times10^{13}/\text{cm}^3"),
    ],
    "units like choices": [
        ("1e-8", r"10^{-8}\,\text{F}"),
        ("7e5", r"7\times10^5\,\text{J}/\text{mol}"),
    ],
    "suns, seconds and millions": [
        ("15625", r"15625\,L_\odot"),
        ("0.49", r"0.49^{\prime\prime}"),
        ("7.5e7", r"75 \text{ million years}"),
    ],
    "several signs": [
        ("1,-1,7,-7", r"m=\pm1 \text{ or } m=\pm7"),
        ("(0,2),(0,-2),(4,23),(4,-23)", r"(0,\pm2),(4,\pm23)"),
        ("(3,2),(3,-2),(-3,2),(-3,-2)", r"(\pm3,\pm2)"),
        ("(3,1),(1,3)", r"(2\pm1, 2\mp1)"),
        ("f(x)=x, f(x)=-x", r"f(x)=\pm x"),
    ],
    "labels of roundings": [
        ("1.6", r"d_1 \approx 1.6"),
        ("1.68,0.45", r"a \approx 1.68, b \approx 0.45"),
    ],
    "ranges": [("(-1,1]", r"f(x)\in(-1,1]"), (r"\log_{10} 2", r"\lg 2")],
    "regions": [
        (r"\frac{1}{s+a}", r"\frac1{s+a},\quad\text{Re}(s)>-a"),
        (r"M_{\odot}^6", r"M_\odot^6"),
    ],
    "units without markup": [
        ("0.006", "6 x 10⁻³ m/s²"),
        ("1.69", "1.69 Å"),
        ("3e8", "3*10^8\\,m/s"),
    ],
}
DIFFERENT = {
    "fractions": [("2024/2025", r"\frac{2023}{2024}"), (r"\frac{4052169}{2027}", "4052170/2027")],
    "parts": [("(2024/2025, 1)", "(2023/2024, 1)"), ("x = 1/300001", "1/300002")],
    "roots": [(r"\frac{2024\pi}{2025}", r"\frac{2023\pi}{2024}"), (r"\pi", "355/113")],
    "tiny values": [(r"\frac{1}{25!}", r"\frac{1}{26!}"), ("e^{-40}", "e^{-41}")],
    "tiny powers": [("2^{-70}", "2^{-71}"), ("2^{-70}x", "2^{-71}x"), ("1-2^{-70}", "1")],
    "tiny decimals": [("2.88e-19", "0"), ("1e-8", "2e-8"), ("0", "10^{-10}")],
    "tiny roots": [(r"\frac{\pi}{10^{60}}", r"\frac{2\pi}{10^{60}}")],
    "large values": [("2^{1009}", "2^{1009}+1"), ("3986729", "3986730"), ("10^{7}", "10000001.0")],
    "few digits": [("1/3", "0.33333"), (r"\pi", "3.1416"), (r"\sqrt2", "1.5")],
    "decimals": [("16386.20", "16386.21"), ("1/2", "0.5000001"), ("2/3", "0.666668")],
    "rounded integers": [(r"\frac{1000000}{3}", "333333"), ("142857", "1000000/7")],
    "per cent": [("28/100", "28"), (r"28\%", r"0.28\%"), ("17.5%", "1.75"), ("5", "5 million")],
    "spaces": [
        ("32349", "32, 349"),
        ("11/2", "1 1/2"),
        ("56", "5 6"),
        ("12", r"1\,2"),
        ("1234567", "1234 567"),
    ],
    "counts": [("1,1,2", "1,2"), ("7", "7, 7"), ("1,1,2", "1,2,2"), (r"\pm 2", "2")],
    "brackets": [("(1,2)", "(2,1)"), ("(3,4]", "(3,4)"), ("1,2", "(1,2]"), ("x\\in[2,7]", "2,7")],
    "commas": [("(2,251,252)", "2251252"), ("(1,234)", "1234"), ("(1,5)", "1.5")],
    "infinity": [(r"(-\infty, 0]", r"(\infty, 0]"), (r"\infty", r"-\infty")],
    "intervals": [(r"(-\infty, 0)", "7, 4"), (r"x > 3", r"x \ge 3")],
    "labels": [
        ("a=1, b=2", "a=2, b=1"),
        ("N=n", "N=n+1"),
        ("N=n", "n+1"),
        ("(3,2)", "(p,q)=(2,3)"),
    ],
    "equations": [("a^2 + b = 0", "0")],
    "choices": [("C", "(D) 12"), ("C", "12"), ("13", "(C) 12"), ("A", "A, C"), ("D", "(C) (D)")],
    "words": [("yes", "no"), (r"\text{even}", "odd"), ("evil", "live"), ("Ann won", "Bob won")],
    "bases": [("-37_8", "-37_9"), ("-37_8", "-37")],
    "residues": [("9 mod 11", "9 mod 13"), ("9", r"8 \pmod{11}"), ("12", "13th")],
    "bases and times": [("52_8", "52_9"), ("52_8", "52"), ("52", "52_8"), ("12:00", "1:00")],
    "capitals": [
        ("kT", "kt"),
        ("kC", "kc"),
        ("mR^2", "mr^2"),
        (r"2\pi/\omega", r"2\pi/\Omega"),
        ("E_1", "E_2"),
    ],
    "derivatives": [("y'+y=0", "y+y=0"), (r"\frac{dM}{dr}", r"\frac{dM}{dt}")],
    "factors": [("2ab", "2"), ("4h^2", "4"), ("$6m$", "6"), ("2", "2x"), (r"2\pi r h", r"2\pi r")],
    "words of capitals": [(r"\text{BAC}", r"\text{ABC}"), ("SSA", "SAS")],
    "unions": [(r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x \ge 3")],
    "several signs": [("1,-1,7,-7", r"m=\pm1 \text{ or } m=7"), ("(3,1),(1,3)", r"(2\pm1, 2\pm1)")],
    "single letters": [("m", "M"), ("N=n", "N")],
    "second derivatives": [("f'(x)", "f''(x)"), ("y''+y=0", "y'+y=0")],
    "numbers behind a fraction": [
        (
            r"\begin{pmatrix}1/7\\48/49\end{pmatrix}",
            r"\frac{1}{49}\begin{pmatrix}16\\48\end{pmatrix}",
        ),
        (r"2\mu", "2"),
    ],
    "several units": [("2", r"2 \text{ hours } 30 \text{ minutes}"), ("7", "7 or 8 cm")],
}


RULES = [(rules, i) for rules in (SPELLINGS, NUMBERS, SYMBOLS) for i in range(len(rules))]


@pytest.mark.parametrize(("rules", "i"), RULES, ids=[rules[i].example for rules, i in RULES])
def test_a_rule_does_what_its_example_says_and_no_other_rule_of_its_list_does(rules, i):
    before, after = rules[i].example.split(" -> ")
    assert rewrite(before, [rules[i]]) == after
    assert rewrite(before, rules) != rewrite(before, rules[:i] + rules[i + 1 :])


@pytest.mark.parametrize("kind", EQUAL)
def test_equal_answers(kind):
    bare = [pair for pair in EQUAL[kind] if not equivalent(*pair)]
    assert bare + [pair for pair in EQUAL[kind] if not equivalent(pair[0], f"${pair[1]}$.")] == []


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_answers(kind):
    assert [pair for pair in DIFFERENT[kind] if equivalent(*pair)] == []


def test_the_order_of_a_list_counts_if_the_benchmark_says_so():
    assert equivalent("10, 4, -2", "4, 10, -2")
    assert not equivalent("10, 4, -2", "4, 10, -2", ordered=True)
    assert not equivalent("(1,2), 5, 3", "(1,2), 3, 5", ordered=True)


def test_the_tolerance_is_absolute():
    assert equivalent("4.2", "4.15", tolerance=0.1)
    assert not equivalent("4.2", "4.35", tolerance=0.1)
    assert equivalent("1.68,0.45", "0.46, 1.7", tolerance=0.02)
    assert equivalent("3.1", r"\pi", tolerance=0.05)
    assert not equivalent("3.1", r"\pi", tolerance=0.04)


def judge(cases):
    """Verdicts on pairs of a gold and a response, in a process of its own."""
    with closing(MathGrader(timeout=20.0, num_workers=1)) as grader:
        verdicts = grader.grade([Question(gold, response) for gold, response in cases])
    return [right for right, _ in verdicts]


def judge_by_math_verify(gold, response):
    sides = [parse(text, parsing_timeout=None) for text in (rf"\boxed{{{gold}}}", response)]
    return verify(*sides, timeout_seconds=None)


@pytest.mark.parametrize("path", SHARED_CASES, ids=lambda path: path.stem)
def test_shared_cases(path):
    cases = read_lines(path)
    verdicts = judge([(case["gold"], case["pred"]) for case in cases])
    assert [c for c, verdict in zip(cases, verdicts, strict=True) if verdict != c["expected"]] == []


def test_more_agreement_and_fewer_false_positives_than_math_verify_alone():
    """On the test suites of ten other projects."""
    rows = read_lines(shared_data("verify_cases"))
    wrap = {"answer": r"\boxed{%s}"}
    cases = [(row["gold"], wrap.get(row["form"], "%s").replace("%s", row["pred"])) for row in rows]
    pool = Pool(1)
    running = [pool.schedule(judge_by_math_verify, case, timeout=20.0) for case in cases]
    alone = [not future.exception() and future.result() for future in running]
    pool.kill()

    def score(verdicts):
        pairs = [(verdict, row["equal"]) for verdict, row in zip(verdicts, rows, strict=True)]
        return sum(a == b for a, b in pairs), pairs.count((True, False))

    assert (score(judge(cases)), score(alone), len(rows)) == ((312, 2), (309, 3), 321)
