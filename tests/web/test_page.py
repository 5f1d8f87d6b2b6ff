"""The chat page in a browser: writing, reading, branching, keeping."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmjax.config import ServerConfig
from tests.serve.conftest import Running, also_serving
from tests.web.conftest import ELSEWHERE, Visitor
from tests.web.page import axe_finds, button, expect, settings
from tests.web.scripts import CONTEXT, DESCENT, LINES, SCRIPTS, SUM, WEATHER

pytestmark = pytest.mark.slow

HELLO, OTHER = SCRIPTS["hello"], SCRIPTS["other"]
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360f8cf500f000301"
    "0180e0b0d6a80000000049454e44ae426082"
)


def test_a_message_is_answered_in_a_stream(visitor: Visitor) -> None:
    page = visitor.page
    answer = visitor.ask("Hi! [[hello]]")
    expect(answer.locator(".markdown")).to_have_text(HELLO)
    expect(page.locator(".message.user .plain")).to_have_text("Hi! [[hello]]")
    expect(page.get_by_role("link", name="Hi! [[hello]]")).to_have_attribute("aria-current", "page")
    (body,) = visitor.bodies()
    assert body["stream"] is True and body["messages"] == [{"role": "user", "content": "Hi! [[hello]]"}]
    assert re.search(r"\d+ tokens · [\d.,]+ tokens/s · first after [\d.]+ m?s", answer.locator(".stats").inner_text())
    used = int(page.locator("meter").get_attribute("value"))
    assert int(answer.locator(".stats").inner_text().split()[0]) < used < CONTEXT
    assert page.locator("[role=status]").last.inner_text() == "The answer is complete."


def test_markdown_formulas_and_code(visitor_of: Callable[..., Visitor], server: Running) -> None:
    visitor = visitor_of(server.url, permissions=["clipboard-read", "clipboard-write"])
    visitor.open()
    answer = visitor.ask(DESCENT)
    expect(answer.locator("strong")).to_have_text("downhill")
    expect(answer.locator("math")).to_have_count(2)
    assert answer.locator("math[display=block]").count() == 1
    expect(answer.locator(".hljs-keyword").first).to_have_text("import")
    assert answer.locator("tbody tr").count() == 3 and answer.locator("ol li").count() == 2
    button(answer, "Copy").first.click()
    expect(answer.locator(".code-bar button")).to_have_text("Copied")
    code = re.search(r"```python\n(.*?)```", SCRIPTS[DESCENT], re.DOTALL)
    assert code is not None and visitor.page.evaluate("navigator.clipboard.readText()") == code[1]
    answer.locator(".tools").get_by_role("button", name="Copy").click()
    expect(answer.locator(".tools").get_by_role("button", name="Copied")).to_be_visible()
    assert visitor.page.evaluate("navigator.clipboard.readText()").strip() == SCRIPTS[DESCENT].strip()


def test_reasoning_is_folded(visitor: Visitor) -> None:
    answer = visitor.ask(SUM)
    thoughts = answer.locator("details.reasoning")
    expect(thoughts).not_to_have_attribute("open", re.compile(""))
    expect(answer.locator(".markdown").last).to_have_text("It comes to twelve, without any doubt.")
    thoughts.locator("summary").click()
    expect(thoughts.locator(".markdown")).to_have_text("The sum of seven and five must be twelve.")


def test_tools_are_called_and_get_results(visitor: Visitor) -> None:
    tool = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    panel = settings(visitor, "Tools")
    panel.get_by_label("Tools as JSON").fill("[{")
    expect(panel.locator("details[open] .problem")).to_contain_text("JSON")
    panel.get_by_label("Tools as JSON").fill(json.dumps([tool]))
    answer = visitor.ask(WEATHER)
    expect(answer.locator(".call-name")).to_have_text("Calls get_weather")
    assert json.loads(answer.locator(".call pre").inner_text()) == {"city": "Paris"}
    visitor.page.get_by_label("Result of get_weather").fill("22 degrees [[sunny]]")
    button(visitor.page, "Send results").click()
    expect(visitor.answers.last.locator(".markdown")).to_have_text(SCRIPTS["sunny"])
    first, second = visitor.bodies()
    assert first["tools"] == [{"type": "function", "function": tool}]
    _, called, result = second["messages"]
    assert called["tool_calls"][0]["id"] == result["tool_call_id"] and result["content"] == "22 degrees [[sunny]]"


def test_a_long_answer_is_stopped_and_continued(visitor: Visitor, server: Running) -> None:
    page = visitor.page
    visitor.say("[[code]]")
    expect(visitor.answers.last.locator("code")).to_contain_text("value_0005")
    button(page, "Stop").click()
    expect(visitor.answers.last.locator(".stats")).to_contain_text("stopped")
    server.wait_idle()
    shown = visitor.answers.last.locator("code").inner_text().count("\n")
    assert 5 <= shown < LINES
    button(page, "Continue").click()
    expect(visitor.answers.last).to_contain_text("That was the whole of it.", timeout=60_000)
    assert visitor.answers.count() == 1
    code = visitor.answers.last.locator("code").inner_text().splitlines()
    assert [line.split(" ")[0] for line in code if line] == [f"value_{i:04}" for i in range(LINES)]
    at_end = "e => e.scrollHeight - e.scrollTop - e.clientHeight < 3"
    page.wait_for_function(f"({at_end})(document.querySelector('.messages'))")
    assert visitor.bodies()[1]["continue_final_message"] is True


def test_other_answers_and_edits_are_branches(visitor: Visitor) -> None:
    page = visitor.page
    visitor.ask("[[hello]]")
    button(page, "Another answer").click()
    expect(page.locator(".branches")).to_have_text("2 / 2")
    expect(visitor.answers.locator(".markdown")).to_have_text(HELLO)
    page.locator(".message.user").hover()
    button(page.locator(".message.user"), "Edit").click()
    page.get_by_label("Edited message").fill("Now [[other]]")
    button(page, "Send").first.click()
    expect(visitor.answers.locator(".markdown")).to_have_text(OTHER)
    expect(page.locator(".message.user .branches")).to_have_text("2 / 2")
    button(page.locator(".message.user"), "Previous branch").click()
    expect(visitor.answers.locator(".markdown")).to_have_text(HELLO)
    assert [body["messages"][-1]["content"] for body in visitor.bodies()] == ["[[hello]]"] * 2 + ["Now [[other]]"]
    button(visitor.answers, "Edit").click()
    page.get_by_label("Edited message").fill("In my own words.")
    button(page, "Save as a branch").click()
    expect(visitor.answers.locator(".markdown")).to_have_text("In my own words.")
    expect(visitor.answers.locator(".branches")).to_have_text("3 / 3")
    page.reload()
    expect(visitor.answers.locator(".markdown")).to_have_text("In my own words.")
    assert len(visitor.bodies()) == 3


def test_several_answers_at_once_are_branches(visitor: Visitor) -> None:
    panel = settings(visitor, "Length")
    panel.get_by_label("Answers n").fill("2")
    visitor.ask("[[hello]]")
    expect(visitor.answers.locator(".branches")).to_have_text("1 / 2")
    button(visitor.answers, "Next branch").click()
    expect(visitor.answers.locator(".markdown")).to_have_text(HELLO)


def test_what_was_written_outlives_a_reload(visitor: Visitor, server: Running) -> None:
    visitor.say("[[code]]")
    expect(visitor.answers.last.locator("code")).to_contain_text("value_0005")
    server.call(server.engine.pause_generation("keep"))
    visitor.page.wait_for_timeout(1500)  # it is kept once a second
    visitor.page.get_by_role("textbox", name="Message").fill("a draft")
    visitor.page.reload()
    expect(visitor.answers.last.locator("code")).to_contain_text("value_0005")
    expect(visitor.answers.last).to_contain_text("This answer was interrupted.")
    expect(visitor.page.get_by_role("textbox", name="Message")).to_have_value("a draft")
    server.call(server.engine.resume_generation())
    server.wait_idle()


def test_files_are_attached(visitor_of: Callable[..., Visitor], server: Running) -> None:
    visitor = visitor_of(server.url)
    visitor.expected = ("400",)  # the model sees nothing, whatever the page is told
    page = visitor.page
    visitor.open()
    files = page.get_by_label("Files to attach")
    picture = {"name": "dot.png", "mimeType": "image/png", "buffer": PIXEL}
    files.set_input_files([picture])
    expect(page.get_by_role("alert")).to_have_text("dot.png is a picture, and this model reads text only.")
    files.set_input_files([{"name": "a.bin", "mimeType": "", "buffer": b"\xff\xfe\x00"}])
    expect(page.get_by_role("alert")).to_have_text("a.bin is not a text in UTF-8.")
    files.set_input_files([{"name": "notes.md", "mimeType": "text/markdown", "buffer": b"a ``` fence\n"}])
    visitor.ask("[[hello]]")
    assert visitor.bodies()[-1]["messages"][-1]["content"] == "File notes.md:\n````\na ``` fence\n````\n\n[[hello]]"
    expect(page.locator(".attachments summary")).to_contain_text("notes.md")

    def sees(route: Any) -> None:
        body = httpx.get(route.request.url, timeout=None).json()
        body["data"][0]["input_modalities"] = ["text", "image"]
        route.fulfill(json=body)

    page.route("**/v1/models", sees)
    page.reload()
    expect(button(page, "Attach pictures or text files")).to_be_visible()
    page.get_by_label("Files to attach").set_input_files([picture])
    visitor.say("What is this?")
    expect(page.locator(".message.user img")).to_be_visible()
    expect(visitor.answers.last.get_by_role("alert")).to_be_visible()
    image, text = visitor.bodies()[-1]["messages"][-1]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,iVBOR") and text["text"] == "What is this?"
    large = page.evaluate(
        "() => { const c = document.createElement('canvas'); c.width = 3000; c.height = 600;"
        " const g = c.getContext('2d'); const d = g.createImageData(3000, 600);"
        " let s = 1; for (let i = 0; i < d.data.length; i++) d.data[i] = (s = (s * 48271) % 2147483647) & 255;"
        " g.putImageData(d, 0, 0); return c.toDataURL().split(',')[1]; }"
    )
    assert len(large) > 2**22
    buffer = base64.b64decode(large)
    page.get_by_label("Files to attach").set_input_files([{**picture, "name": "large.png", "buffer": buffer}])
    expect(page.locator(".pending img")).to_have_js_property("naturalWidth", 2048)
    page.get_by_label("Files to attach").set_input_files([{**picture, "name": "broken.png", "buffer": b"no picture"}])
    expect(page.locator(".pending")).to_have_count(2)  # whether its content is one, the server says


def test_settings_reach_the_server(visitor: Visitor) -> None:
    panel = settings(visitor)
    panel.get_by_label("System prompt").fill("Be brief.")
    panel.get_by_label("Temperature temperature").fill("hot")
    expect(panel.locator(".problem")).to_have_text("must be a number")
    panel.get_by_label("Temperature temperature").fill("0.3")
    panel.get_by_label("Seed seed").fill("7")
    panel.locator("summary", has_text="Length").click()
    panel.get_by_label("Stop texts stop").fill("one\ntwo")
    panel.get_by_label("Name of a new preset").fill("Mine")
    button(panel, "Save").click()
    panel.get_by_role("combobox", name="Preset", exact=True).select_option("Precise")
    expect(panel.get_by_label("Temperature temperature")).to_have_value("0")
    panel.get_by_role("combobox", name="Preset", exact=True).select_option("Mine")
    panel.locator("summary", has_text="Form of the answer").click()
    panel.get_by_label("JSON schema").fill('{"type": "string"')
    visitor.say("[[hello]]")
    expect(visitor.page.locator(".bottom .problem")).to_contain_text("JSON schema:")
    assert visitor.bodies() == []
    panel.get_by_label("JSON schema").fill('{"type": "string", "maxLength": 5}')
    button(panel, "Close settings").click()
    answer = visitor.ask("[[hello]]")
    assert isinstance(json.loads(answer.locator(".markdown").inner_text()), str)
    (body,) = visitor.bodies()
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["seed"], body["stop"]) == (0.3, 7, ["one", "two"])
    assert body["response_format"]["json_schema"]["schema"] == {"type": "string", "maxLength": 5}
    visitor.page.reload()
    settings(visitor)
    expect(visitor.page.get_by_label("Temperature temperature")).to_have_value("0.3")


def test_probabilities_are_shown_under_the_pointer(visitor: Visitor) -> None:
    panel = settings(visitor, "Probabilities")
    panel.get_by_label("Ask how likely each token was").check()
    answer = visitor.ask("[[hello]]")
    button(answer, "Probabilities").click()
    tokens = answer.locator(".tokens span")
    tokens.nth(1).hover()
    tip = answer.locator(".tip")
    expect(tip.locator("tr")).to_have_count(5)
    expect(tip.locator(".chosen td").first).to_have_text("lo,")
    answer.locator(".tokens").focus()
    visitor.page.keyboard.press("ArrowRight")
    expect(tip.locator(".chosen td").first).to_have_text("␣dea")
    assert visitor.bodies()[0]["top_logprobs"] == 5


def test_a_conversation_is_renamed_exported_deleted_and_imported(visitor: Visitor, tmp_path: Path) -> None:
    page = visitor.page
    visitor.ask("First [[hello]]")
    page.get_by_role("button", name="Options of First").click()
    page.get_by_label("Name", exact=True).fill("Greetings, dear <b>all</b>")
    button(page, "Rename").click()
    link = page.get_by_role("link", name="Greetings, dear <b>all</b>")
    expect(link).to_be_visible()
    page.get_by_role("button", name="Options of Greetings").click()
    with page.expect_download() as waiting:
        button(page, "As Markdown").click()
    markdown = Path(waiting.value.path()).read_text()
    assert markdown.startswith("# Greetings, dear <b>all</b>\n") and HELLO in markdown
    with page.expect_download() as waiting:
        button(page, "Export").click()
    waiting.value.save_as(tmp_path / waiting.value.suggested_filename)
    button(page, "Delete").click()
    button(page, "Delete for good").click()
    expect(link).to_have_count(0)
    page.reload()
    expect(link).to_have_count(0)
    page.get_by_label("Files to import").set_input_files(tmp_path / "Greetings-dear-b-all-b.json")
    link.click()
    expect(visitor.answers.locator(".markdown")).to_have_text(HELLO)
    (tmp_path / "wrong.json").write_text('{"messages": {"a": {"id": "a", "role": "user", "content": 3}}}')
    page.get_by_label("Files to import").set_input_files(tmp_path / "wrong.json")
    expect(page.locator(".notice")).to_have_text("Not imported: message a: its content is not a text")


def message(name: str, role: str, parent: str | None, content: str, created: int) -> dict[str, Any]:
    return {"id": name, "role": role, "parent": parent, "content": content, "created": created, "touched": created}


def test_two_hundred_conversations(visitor: Visitor, tmp_path: Path) -> None:
    def conversation(number: int) -> dict[str, Any]:
        asked = message("a", "user", None, f"Question number {number}", 1000 + number)
        answered = message("b", "assistant", "a", f"The answer is {number * number} of course", 2000 + number)
        return {"id": f"c{number}", "leaf": "b", "created": number + 1, "updated": 10**12 + number} | {
            "messages": {"a": asked, "b": answered}
        }

    page = visitor.page
    several = {"conversations": [conversation(number) for number in range(200)]}
    (tmp_path / "many.json").write_text(json.dumps(several))
    page.get_by_label("Files to import").set_input_files(tmp_path / "many.json")
    expect(page.locator(".notice")).to_have_text("200 conversations imported.")
    expect(page.locator(".list .row")).to_have_count(200)
    page.keyboard.press("Control+k")
    page.keyboard.type("answer 39601")
    expect(page.locator(".list .row")).to_have_count(1)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(visitor.answers.locator(".markdown")).to_have_text("The answer is 39601 of course")
    page.reload()
    expect(page.locator(".list .row")).to_have_count(200)
    with page.expect_download() as waiting:
        button(page, "Export all conversations").click()
    kept = json.loads(Path(waiting.value.path()).read_text())["conversations"]
    assert {one["id"] for one in kept} == {one["id"] for one in several["conversations"]}


def test_two_tabs_show_the_same(visitor: Visitor) -> None:
    visitor.ask("[[hello]]")
    second = Visitor(visitor.page.context.new_page(), visitor.url)
    second.open("/" + visitor.page.evaluate("location.hash"))
    expect(second.answers.locator(".markdown")).to_have_text(HELLO)
    button(second.page, "Another answer").click()
    expect(second.page.locator(".branches")).to_have_text("2 / 2")
    expect(visitor.page.locator(".branches")).to_have_text("1 / 2")
    visitor.ask("More [[other]]")
    expect(second.page.locator(".message")).to_have_count(2)  # each tab stays on its own branch
    button(second.page, "Previous branch").click()
    expect(second.answers.last.locator(".markdown")).to_have_text(OTHER)
    button(second.page, "New chat").click()
    second.page.get_by_role("button", name="Options of [[hello]]").click()
    button(second.page, "Delete").click()
    button(second.page, "Delete for good").click()
    expect(visitor.page.locator(".list .row")).to_have_count(0)
    expect(visitor.page.locator(".welcome")).to_be_visible()


def test_a_wrong_key_is_told_and_another_asked_for(visitor_of: Callable[..., Visitor], server: Running) -> None:
    with also_serving(server, ServerConfig(port=0, api_key=["open sesame"], guard_metrics=True)) as url:
        visitor = visitor_of(url)
        visitor.expected = ("401",)
        page = visitor.page
        visitor.open()
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_contain_text("This server wants a key.")
        dialog.get_by_label("Key", exact=True).fill("open barley")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_contain_text("missing or wrong API key")
        dialog.get_by_label("Key", exact=True).fill("open sesame")
        dialog.get_by_label("Keep it in this browser").check()
        button(page, "Use this key").click()
        expect(dialog).to_have_count(0)
        expect(visitor.ask("[[hello]]").locator(".markdown")).to_have_text(HELLO)
        page.reload()
        expect(page.get_by_label("Model")).to_have_value("scripted")
        assert dialog.count() == 0


def test_a_server_that_goes_and_comes_back(visitor_of: Callable[..., Visitor], server: Running) -> None:
    with also_serving(server, ServerConfig(port=0)) as url:
        visitor = visitor_of(url)
        visitor.expected = ("ERR_CONNECTION", "ERR_INCOMPLETE", "503")
        visitor.open()
        visitor.ask("[[hello]]")
    page = visitor.page
    visitor.say("Are you there? [[other]]")
    expect(page.locator(".banner")).to_contain_text("The server does not answer.")
    expect(visitor.answers.last.get_by_role("alert")).to_have_text("The server does not answer.")
    with also_serving(server, ServerConfig(port=int(url.rpartition(":")[2]))):
        expect(page.locator(".banner")).to_have_count(0)
        button(visitor.answers.last, "Another answer").click()
        expect(visitor.answers.last.locator(".markdown")).to_have_text(OTHER)


def test_a_server_on_another_machine_without_tls(visitor_of: Callable[..., Visitor], server: Running) -> None:
    with also_serving(server, ServerConfig(port=0, allowed_hosts=[ELSEWHERE])) as url:
        visitor = visitor_of(url.replace("127.0.0.1", ELSEWHERE))
        visitor.expected = ("Cross-Origin-Opener-Policy",)  # which browsers heed with TLS only, and say so
        visitor.open()
        assert visitor.page.evaluate("isSecureContext") is False
        answer = visitor.ask(DESCENT)
        expect(answer.locator(".hljs-keyword").first).to_have_text("import")
        expect(answer.locator("math")).to_have_count(2)
        button(answer, "Copy").first.click()
        expect(answer.locator(".code-bar button")).to_have_text("Copied")
        visitor.page.reload()
        expect(visitor.answers.locator("strong")).to_have_text("downhill")


def test_hostile_answers_run_nothing(visitor: Visitor) -> None:
    answer = visitor.ask("[[hostile]]")
    expect(answer).to_contain_text("Done with all of it.")
    expect(answer.locator(".code code .hljs-tag").first).to_be_visible()
    expect(answer.locator("math")).to_have_count(2)
    assert answer.locator(".math a, .math img, [href^=javascript]").count() == 0
    assert answer.locator("script, iframe, form, style, base, object, embed, [onerror], [onmouseover]").count() == 0
    assert answer.locator(".markdown svg, .markdown img").count() == 0
    links = [link.get_attribute("href") for link in answer.locator(".markdown a").all()]
    assert len(links) >= 2
    assert [link for link in links if link is not None and not link.startswith("https://evil.example/")] == []
    for link in answer.locator(".markdown a:not([href])").all():
        link.click()
    visitor.page.wait_for_timeout(200)
    assert visitor.page.evaluate("window.hacked") is None
    assert [request.url for request in visitor.requests if "evil" in request.url] == []


def test_a_text_is_completed_token_by_token(visitor: Visitor) -> None:
    visitor.open("/#/completion")
    page = visitor.page
    settings(visitor, "Probabilities").get_by_label("Ask how likely each token was").check()
    text = page.get_by_label("Text", exact=True)
    text.fill("x [[hello]]")
    expect(page.locator(".token-list li")).to_have_count(3)
    expect(page.locator(".token-list li span")).to_have_text(["x", "␣", "[[hello]]"])
    button(page, "Go on").click()
    expect(text).to_have_value(f"x [[hello]]{HELLO}")
    expect(page.locator(".tokens span").first).to_have_text("Hel")
    (body,) = visitor.bodies("/v1/completions")
    assert body["max_tokens"] == 128 and body["logprobs"] == 5
    button(page, "Take it back").click()
    expect(text).to_have_value("x [[hello]]")


def test_the_engine_is_shown_live(visitor: Visitor, server: Running) -> None:
    visitor.open("/#/engine")
    page = visitor.page
    body = {"prompt": "[[code]]", "max_tokens": 900}
    with server.http() as http:
        http.post("/v1/completions", json=body)
        metrics = http.get("/metrics").text
    written = re.search(r"^vllm:generation_tokens_total{.*} (.*)$", metrics, re.MULTILINE)
    assert written is not None
    shown = page.locator(".totals div", has_text="tokens written").locator("dd")
    expect(shown).to_have_text(f"{float(written[1]):,.0f}")
    expect(page.locator(".panel", has_text="Written").locator("polyline")).to_have_attribute(
        "points", re.compile(r"\d+\.\d,\d+\.\d \d")
    )
    rows = page.locator(".engine tbody tr")
    expect(rows).to_have_count(4)
    expect(rows.nth(1).locator("td").first).to_contain_text("ms")
    queue = page.get_by_role("row", name="Waiting in the queue").locator("td")
    expect(queue.nth(1)).to_contain_text(re.compile(r"^[\d.]+ m?s$"))  # half of them waited less


def test_the_keyboard_is_enough(visitor: Visitor) -> None:
    page = visitor.page
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("[[hello]]")
    page.keyboard.press("Enter")
    expect(visitor.answers.locator(".markdown")).to_have_text(HELLO)
    assert visitor.bodies()[0]["messages"][0]["content"] == "one\n[[hello]]"
    expect(visitor.answers.first).to_have_attribute("aria-busy", "false")
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Edited message")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+.")
    expect(page.get_by_role("complementary", name="Settings")).to_be_visible()
    page.keyboard.press("Control+/")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("Control+Shift+O")
    expect(page.locator(".welcome")).to_be_visible()
    page.keyboard.type("[[code]]")
    page.keyboard.press("Enter")
    expect(visitor.answers.last.locator("code")).to_contain_text("value_0001")
    page.keyboard.press("Escape")
    expect(visitor.answers.last.locator(".stats")).to_contain_text("stopped")


@pytest.mark.parametrize("colors", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing(visitor_of: Callable[..., Visitor], server: Running, colors: str, width: int) -> None:
    visitor = visitor_of(server.url, color_scheme=colors, has_touch=width < 800)
    page = visitor.page
    page.set_viewport_size({"width": width, "height": 800})
    visitor.open()

    def check(what: str) -> None:
        assert axe_finds(page) == {}, what

    check("nothing said yet")
    settings(visitor, "Probabilities").get_by_label("Ask how likely each token was").check()
    page.evaluate("for (const one of document.querySelectorAll('.settings details')) one.open = true")
    check("settings")
    button(page, "Close settings").click()
    visitor.ask(DESCENT)
    expect(page.locator(".hljs-keyword").first).to_be_visible()
    visitor.ask(SUM)
    page.locator(".reasoning summary").click()
    button(visitor.answers.last, "Another answer").click()
    expect(page.locator(".branches")).to_have_text("2 / 2")
    button(visitor.answers.first, "Probabilities").click()
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tip")).to_be_visible()
    check("a conversation")
    if width < 800:
        button(page, "Conversations").click()
        expect(button(page, "New chat")).to_be_visible()
        check("the list")
    page.get_by_role("button", name="Options of").click()
    check("a dialog")
    page.keyboard.press("Escape")
    page.goto(f"{server.url}/#/completion")
    page.get_by_label("Text", exact=True).fill("some text")
    expect(page.locator(".token-list li").first).to_be_visible()
    check("completion")
    page.goto(f"{server.url}/#/engine")
    expect(page.locator(".panel").first).to_be_visible()
    check("the engine")
    wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wider <= 0
