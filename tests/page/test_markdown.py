"""Markdown in a browser: how it looks, how it grows, and that nothing in it is run."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from playwright.sync_api import expect

SHOW = """async ([parts]) => {
    const { MarkdownView } = await import("./page/markdown.js");
    const view = new MarkdownView();
    document.querySelector("main").replaceChildren(view.element);
    let text = "";
    for (const part of parts) view.update(text += part);
    return view.element.innerHTML;
}"""

SAMPLE = """# Title #

Some *emphasis*, **strong _both_ words**, ~~gone~~ and `code` \\*here\\*.
A [link](https://example.com/a_(b) "title"), <https://example.com/x> and https://example.com/y.
Broken here\\
and there.

Heading
-------

- one
  - two
    1. three
- [ ] open
- [x] done

  a paragraph of it
7) seven

> quoted
lazy
> - item

| left | right | middle |
|:-----|------:|:------:|
| a    | b     | `c\\|d` |
| **e** |

***

```python title
print("*")

    # a comment
```

    indented

    code

~~~
unclosed `fence`
"""


LOAD_VIEWS = """() => Promise.all(
    ["chat", "compare", "steer", "server"].map(name => import(`./page/${name}.js`))
)"""


@pytest.fixture
def show(page: Any, url: str) -> Any:
    """Show a text that comes in parts; return the HTML of what is shown."""
    page.goto(url)
    page.get_by_role("region", name="Chat").wait_for()
    # All that the page asks for by itself is here then, and its model is loaded.
    chosen = page.get_by_role("combobox", name="Model").locator("option:checked")
    expect(chosen).to_have_text(re.compile(r"^demo · [\d.]+ MB$"))
    page.evaluate(LOAD_VIEWS)
    page.evaluate(SHOW, [[]])
    return lambda *parts: page.evaluate(SHOW, [list(parts)])


LOOKS = {
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "# One\n###### Six\n#tag": "<h3>One</h3><h6>Six</h6><p>#tag</p>",
    "- - -\n***": "<hr><hr>",
    "*a* _b_ **c** __d__ ***e***": (
        "<p><em>a</em> <em>b</em> <strong>c</strong> <strong>d"
        "</strong> <em><strong>e</strong></em></p>"
    ),
    "snake_case_name 2 * 3 * 4 a*b*c": "<p>snake_case_name 2 * 3 * 4 a<em>b</em>c</p>",
    "*a **b** c* *foo**bar*": "<p><em>a <strong>b</strong> c</em> <em>foo**bar</em></p>",
    "**bold* ~~no~ ~~yes~~ ~5": "<p>**bold* ~~no~ <s>yes</s> ~5</p>",
    "**「强调」**文": "<p><strong>「强调」</strong>文</p>",
    "`a *b*` `` c`d `` `open": "<p><code>a *b*</code> <code>c`d</code> `open</p>",
    "\\*a\\* \\q one  \ntwo\\\nthree": "<p>*a* \\q one<br>two<br>three</p>",
    "a\n- b\n- c": "<p>a</p><ul><li><p>b</p></li><li><p>c</p></li></ul>",
    "3. a\n4. b\n\n   c": '<ol start="3"><li><p>a</p></li><li><p>b</p><p>c</p></li></ol>',
    "1. a\n  - b\n2. c": (
        '<ol start="1"><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ol>'
    ),
    "- a\n\n    - b": "<ul><li><p>a</p><ul><li><p>b</p></li></ul></li></ul>",
    "In the year\n1984. Or so": "<p>In the year\n1984. Or so</p>",
    "- a\n+ b": "<ul><li><p>a</p></li></ul><ul><li><p>b</p></li></ul>",
    "> a\nb\n> > c\n\nd": (
        "<blockquote><p>a\nb</p><blockquote><p>c</p></blockquote></blockquote><p>d</p>"
    ),
    "<b>no</b> &lt; &amp;": "<p>&lt;b&gt;no&lt;/b&gt; &amp;lt; &amp;amp;</p>",
    "$a_1 * \\no_1$ \\(x_1 * \\no * z\\) $$\n*\\no*$$ $5 and *6* $7": (
        "<p>$a_1 * \\no_1$ \\(x_1 * \\no * z\\) $$\n*\\no*$$ $5 and <em>6</em> $7</p>"
    ),
    "a | b\n--|-- c": "<p>a | b\n--|-- c</p>",
}


def test_what_markdown_becomes(show: Any) -> None:
    assert {text: show(text) for text in LOOKS} == LOOKS


def test_a_table_has_heads_and_alignments(show: Any, page: Any) -> None:
    show("text\n| l | r | m |\n|:--|--:|:-:|\n| a\\|b | `c` |\n| d | e | f | g |\n\nend")
    assert page.locator("main p").all_inner_texts() == ["text", "end"]
    assert page.get_by_role("columnheader").all_inner_texts() == ["l", "r", "m"]
    assert page.get_by_role("cell").all_inner_texts() == ["a|b", "c", "d", "e", "f"]
    aligned = "all => all.map(each => each.style.textAlign)"
    assert page.get_by_role("columnheader").evaluate_all(aligned) == ["", "end", "center"]


def test_tasks_are_boxes_that_say_whether_they_are_done(show: Any, page: Any) -> None:
    show("- [ ] open\n- [x] done\n- [link]")
    assert [
        box.get_attribute("aria-label") for box in page.locator("main input[disabled]").all()
    ] == ["Not done", "Done"]
    assert page.locator("main li").all_inner_texts() == ["open", "done", "[link]"]


def test_code_keeps_its_text_and_is_copied(show: Any, page: Any) -> None:
    show("1. see\n\n   ```make x=1\n   all:\n   \t<b>echo</b>\n\n   ```\n\nend")
    assert page.locator("main .framed .bar span").inner_text() == "make"
    assert page.locator("main pre code").text_content() == "all:\n\t<b>echo</b>\n"
    page.get_by_role("button", name="Copy the code").click()
    assert page.evaluate("navigator.clipboard.readText()") == "all:\n\t<b>echo</b>\n"


LINKS = [
    ("[a](https://example.com)", "a", "https://example.com/"),
    ("[*a*](<http://example.com/x y>)", "a", "http://example.com/x%20y"),
    ("[a](MAILTO:me@example.com 'title')", "a", "mailto:me@example.com"),
    ("<https://example.com/a*b*c>", "https://example.com/a*b*c", "https://example.com/a*b*c"),
    ("(https://example.com/a_b_c).", "https://example.com/a_b_c", "https://example.com/a_b_c"),
    ("https://example.com/a_(b)!", "https://example.com/a_(b)", "https://example.com/a_(b)"),
    ("[a [b] c](https://example.com/q)", "a [b] c", "https://example.com/q"),
    ("[https://a.example](https://b.example)", "https://a.example", "https://b.example/"),
    ("[![alt](https://a.example/i.png)](https://b.example)", "alt", "https://b.example/"),
]


def test_links_open_apart_and_tell_no_referrer(show: Any, page: Any) -> None:
    for text, name, href in LINKS:
        show(text)
        link = page.locator("main a")
        assert link.inner_text() == name
        told = link.evaluate("a => [a.href, a.title, a.target, a.rel]")
        assert told == [href, href, "_blank", "noopener noreferrer"]


HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<a href='javascript:window.hacked=1'>x</a>",
    "[x](javascript:window.hacked=1)",
    "[x](JaVaScRiPt:window.hacked=1)",
    "[x](java\tscript:window.hacked=1)",
    "[x](<java\tscript:window.hacked=1>)",
    "[x](<java\\\nscript:window.hacked=1>)",
    "[x](&#106;avascript:window.hacked=1)",
    "[x](javascript&colon;window.hacked=1)",
    "[x](\x01javascript:window.hacked=1)",
    "[x](<  javascript:window.hacked=1>)",
    "[x](vbscript:x)",
    "[x](data:text/html,<script>window.hacked=1</script>)",
    "[x](//example.com)",
    "[x](/v1/models)",
    "[x](#server)",
    "[x](file:///etc/passwd)",
    "[x](blob:https://example.com/x)",
    "<javascript:window.hacked=1>",
    "![x](data:image/svg+xml;base64,PHN2Zz4=)",
    "![x](javascript:window.hacked=1)",
    "[x](https://)",
    '[x](https://example.com/"onmouseover="window.hacked=1)',
]


def test_hostile_text_is_text(show: Any, page: Any) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    for text in HOSTILE:
        show(text)
        page.evaluate("new Promise(requestAnimationFrame)")
        assert page.locator("main :is(script, img, iframe, object, embed, svg)").count() == 0
        for link in page.locator("main a").all():
            assert link.get_attribute("href").startswith("https://example.com/")
            link.hover()
        assert page.evaluate("window.hacked ?? null") is None
    assert requests == []


def test_an_image_is_a_link_and_nobody_fetches_it(show: Any, page: Any, url: str) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    show(f"![a *cat*]({url}/page/icon.svg) ![](https://example.com/i.png)")
    page.evaluate("new Promise(requestAnimationFrame)")
    assert page.locator("main a").all_inner_texts() == [
        "a cat",
        "https://example.com/i.png",
    ]
    assert requests == []


def test_characters_that_hide_are_named(show: Any, page: Any) -> None:
    hidden = "\x1b[31m\u202ereversed\u2066\u200b\U000e0041\x00\r."
    names = ["U+001B", "U+202E", "U+2066", "U+200B", "U+E0041", "U+0000", "U+000D"]
    for text in (hidden, f"`{hidden}`", f"```\n{hidden}\n```", f"[{hidden}](https://example.com)"):
        show(text)
        assert page.locator("main .hidden-character").all_inner_texts() == names
        assert "\u202e" not in page.locator("main").text_content()


def test_text_to_the_left_changes_nothing_beside_it(show: Any, page: Any) -> None:
    show("שלום *עולם*\n\nHello שלום\n\n`שלום` 1\n\n- שלום")
    bidi = "all => all.map(each => getComputedStyle(each).unicodeBidi)"
    assert set(page.locator("main p").evaluate_all(bidi)) == {"plaintext"}
    assert page.locator("main code").evaluate_all(bidi) == ["isolate"]
    left = page.locator("main p > em").bounding_box()["x"]
    assert left > page.locator("main").bounding_box()["width"] / 2


def test_what_is_finished_stays_the_same_element(show: Any, page: Any) -> None:
    assert page.evaluate("""async () => {
        const { MarkdownView } = await import("./page/markdown.js");
        const view = new MarkdownView();
        view.update("# One\\n\\ntwo\\n\\n- three\\n\\n```\\nfour\\n");
        const before = [...view.element.children];
        const copy = view.element.querySelector("button");
        view.update("# One\\n\\ntwo\\n\\n- three\\n\\n```\\nfour\\nfive\\n```\\n\\nsix");
        const same = before.every((each, index) => each === view.element.children[index]);
        const kept = copy === view.element.querySelector("button");
        view.update("Another");
        return [same, kept, view.element.innerHTML];
    }""") == [True, True, "<p>Another</p>"]


def test_a_tool_call_shows_what_hides_and_copies_it_as_it_is(page: Any, url: str) -> None:
    page.goto(url)
    page.get_by_role("region", name="Chat").wait_for()
    page.evaluate("""async () => {
        const { AnswerView } = await import("./page/answer.js");
        const { emptyAnswer } = await import("./page/generate.js");
        const view = new AnswerView({ announce() {}, models: { names: [] } });
        document.querySelector("main").replaceChildren(view.element);
        const called = { name: "rm\\u202e", arguments: '{"path": "<b>\\u202e"}' };
        view.update({
            ...emptyAnswer(),
            calls: [{ id: "1", type: "function", function: called }],
            finish: "tool_calls",
        });
    }""")
    call = page.get_by_role("group", name="Tool call")
    expect(call.locator("pre")).to_have_text('{\n  "path": "<b>U+202E"\n}')
    expect(call).to_contain_text("Calls rmU+202E")
    call.get_by_role("button", name="Copy the arguments").click()
    assert page.evaluate("navigator.clipboard.readText()") == '{\n  "path": "<b>\u202e"\n}'


WORDS = (
    *"\n\n\n\n\n\n\n\n  ``*_~[]()!<>#-+|:$\\.1ab",
    *(
        "\n\n",
        "\n- ",
        "\n  ",
        "\n    ",
        "\n1. ",
        "\n> ",
        "\n```",
        "\n~~~\n",
        "\n| a | b |",
        "\n|-|-|",
    ),
    *(
        "**",
        "***",
        "~~",
        "](https://a.b)",
        "http://a.b",
        "\n---\n",
        "\n# ",
        "[x] ",
        "\t",
        "\r\n",
        "é",
        "😀",
    ),
)


def cut(text: str, chance: random.Random) -> Sequence[str]:
    places = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(12)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("seed", range(4))
def test_a_text_that_arrives_in_parts_looks_as_if_it_came_at_once(
    page: Any, url: str, seed: int
) -> None:
    chance = random.Random(seed)
    texts = ["".join(chance.choices(WORDS, k=chance.randrange(1, 120))) for _ in range(300)]
    cases = [[text, list(cut(text, chance)), list(text)] for text in [SAMPLE, *texts]]
    page.goto(url)
    different = page.evaluate(
        """async (cases) => {
        const { MarkdownView } = await import("./page/markdown.js");
        const shown = (parts) => {
            const view = new MarkdownView();
            let text = "";
            for (const part of parts) view.update((text += part));
            return view.element.innerHTML;
        };
        return cases.filter(([text, cut, characters]) => {
            const whole = shown([text]);
            return whole !== shown(cut) || whole !== shown(characters);
        });
    }""",
        cases,
    )
    assert different == []


N = 100_000
LONG = {
    "a line": "x" * N,
    "words": "word " * (N // 5),
    "spaces": "a" + " " * N + "b",
    "quotes": ">" * 10_000 + "x\n" + "> " * 10_000 + "y",
    "items": "- " * 10_000 + "x\n" + "1. " * 10_000,
    "nested items": "".join(" " * (2 * depth) + "- x\n" for depth in range(400)),
    "stars": "*" * 10_000 + "a" + "*" * 10_000,
    "open stars": "*a " * 30_000,
    "nested stars": "*a " * 10_000 + "b* " * 10_000,
    "mixed marks": "*a _b **c ~~d " * 5_000 + "d~~ c** b_ a* " * 5_000,
    "brackets": "[" * 50_000 + "]" * 50_000,
    "open links": "[a](" * 25_000,
    "open titles": '[a](b "' * 14_000,
    "links in links": "[" * 10_000 + "a" + "](https://a.b)" * 6_000,
    "images in images": "![" * 10_000 + "a" + "](https://a.b)" * 6_000,
    "backticks": "".join("`" * size + "a" for size in range(1, 440)),
    "backtick pairs": "`a``" * 8_000,
    "formulas": "\\(" * 30_000 + "$a" * 20_000,
    "addresses": "http://a" * 12_000 + ")" * N,
    "angles": "<http://" * 12_000,
    "a table": "|a" * 200 + "\n" + "|-" * 200 + "\n" + "|b\n" * 4_000,
    "pipes": "|" * N + "\n" + "|-" * 50_000,
    "escapes": "\x1b[31m" * 4_000,
    "hidden characters": "\x1b" * 4_000,
    "hidden code": "```\n" + "a\x1b" * 4_000,
    "hidden emphasis": "**" + "\x1ba" * 4_000 + "**",
    "hashes": "# " + " #" * 50_000 + "x",
    "breaks": "a  \n" * 5_000,
    "headings": "a\n===\n" * 2_000,
    "fences": "```\n" * 4_000,
}


def test_long_and_deep_texts_do_not_hang(page: Any, url: str) -> None:
    page.goto(url)
    for name, text in LONG.items():
        shown, deepest = page.evaluate(
            """async (text) => {
            const { MarkdownView } = await import("./page/markdown.js");
            const view = new MarkdownView();
            for (const end of [text.length / 2, text.length - 1, text.length])
                view.update(text.slice(0, end));
            document.querySelector("main").replaceChildren(view.element);
            const { height } = view.element.getBoundingClientRect();
            const depth = (node) =>
                [...node.children].reduce((most, each) => Math.max(most, 1 + depth(each)), 0);
            return [height > 0, depth(view.element)];
        }""",
            text,
        )
        assert shown, name
        assert deepest < 64, name
