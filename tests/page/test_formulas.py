"""Formulas are drawn as MathML, and code is coloured, without any library."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

MATH = """async ([source, display]) => {
    const { mathOf } = await import("./page/math.js");
    const made = mathOf(source, display)?.outerHTML ?? null;
    return made && made.replace(/ (xmlns|alttext|display)="[^"]*"/g, "");
}"""

UNDERSTOOD = {
    r"x": "<mi>x</mi>",
    r"12.5": "<mn>12.5</mn>",
    r"x_1^2": "<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>",
    r"f'": '<msup><mi>f</mi><mo lspace="0" rspace="0">′</mo></msup>',
    r"\frac{a}2": "<mfrac><mi>a</mi><mn>2</mn></mfrac>",
    r"\sqrt[3]{x}": "<mroot><mi>x</mi><mn>3</mn></mroot>",
    r"\alpha \le \mathbb R": '<mrow><mi>α</mi><mo>≤</mo><mi mathvariant="normal">ℝ</mi></mrow>',
    r"\mathbf{ab}": '<mrow><mi mathvariant="normal">𝐚</mi><mi mathvariant="normal">𝐛</mi></mrow>',
    r"\text{if } n": "<mrow><mtext>if </mtext><mi>n</mi></mrow>",
    r"a \not= b": "<mrow><mi>a</mi><mo>≠</mo><mi>b</mi></mrow>",
}

LEFT_AS_THEY_ARE = [
    *(r"\unknown x", r"\frac{a}", r"{a", r"a}", "x & y", r"\begin{tikzpicture}\end{tikzpicture}"),
    *("a\u202eb", "{" * 100 + "}" * 100, "x" * 30_000, r"\left( x", r"\begin{matrix} a"),
]


def test_what_is_understood_becomes_mathml_and_the_rest_stays(page: Any, url: str) -> None:
    page.goto(url)
    for source, made in UNDERSTOOD.items():
        assert page.evaluate(MATH, [source, False]) == f"<math>{made}</math>", source
    for source in LEFT_AS_THEY_ARE:
        assert page.evaluate(MATH, [source, True]) is None, source


MARKDOWN = """async text => {
    const { MarkdownView } = await import("./page/markdown.js");
    const view = new MarkdownView();
    for (let end = 1; end < text.length; end++) view.update(text.slice(0, end));
    view.update(text);
    document.body.replaceChildren(view.element);
    return [...view.element.children].map(each => each.localName + "." + each.className);
}"""


def test_formulas_stand_in_lines_and_between_them(page: Any, url: str) -> None:
    page.goto(url)
    text = (
        "A $x^2$ costs $5 and $6, \\(y\\) is $HOME/$USER.\n\n$$\na\n- b\n= c\n$$\n\n"
        "So:\n\\[\n\\sum_{i=1}^n i\n\\]\nEnd.\n\n$$ 5 dollars\n\nare **no** formula.\n"
    )
    kinds = page.evaluate(MARKDOWN, text)
    assert kinds == ["p.", "div.formula", "p.", "div.formula", "p.", "p.", "p."]
    assert page.locator("p math").count() == 2
    expect(page.locator("p").first).to_contain_text("costs $5 and $6")
    expect(page.locator("p").first).to_contain_text("$HOME/$USER")
    inner, outer = page.locator(".formula math").all()
    assert inner.evaluate("each => each.querySelectorAll('mo').length") == 2
    assert outer.evaluate("each => each.querySelectorAll('munderover').length") == 1
    expect(page.get_by_text("$$ 5 dollars")).to_be_visible()
    assert page.locator("strong").inner_text() == "no"


CODE = {
    "python": (
        'def f(x): # why\n    return "a" + 1\n',
        "keyword name comment keyword string number",
    ),
    "js": ("const a = `b ${c}`; // d", "keyword string comment"),
    "json": ('{"a": [1, true]}', "name number keyword"),
    "rust": ("fn f<'a>() { 'x' }", "keyword string"),
    "sql": ("SELECT a -- b\n", "keyword comment"),
    "unknown": ('def "x"', ""),
}


@pytest.mark.parametrize("language", [*CODE])
def test_code_is_coloured_as_it_arrives(page: Any, url: str, language: str) -> None:
    page.goto(url)
    code, kinds = CODE[language]
    page.evaluate(MARKDOWN, f"```{language}\n{code}\n```\n")
    made = page.locator("pre code")
    assert made.inner_text().strip() == code.strip()
    found = made.locator("span").evaluate_all("all => all.map(each => each.className)")
    assert " ".join(found) == kinds
