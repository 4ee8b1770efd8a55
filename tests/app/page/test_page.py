"""What the page does when an answer, the server or the connection is not as it should be."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import Response
from fastapi.responses import JSONResponse

from tests.app.page.browser import DONE, GATE, MODELS, PROGRAM, Api, delta, run

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here")

LONGEST_NAME = "x" * 128
RUNNING = f'vllm:num_requests_running{{engine="abcdefgh",model_name="{LONGEST_NAME}"}} 1.0\n'


def first_tokens(in_10_ms: int, in_1_s: int) -> Response:
    """Metrics in which so many answers had their first token after at most so long."""
    buckets = {"0.01": in_10_ms, "1.0": in_10_ms + in_1_s, "+Inf": in_10_ms + in_1_s}
    name = "vllm:time_to_first_token_seconds_bucket"
    return Response("".join(f'{name}{{le="{edge}",model_name="m"}} {count}\n' for edge, count in buckets.items()))


def test_a_new_chat_begins_without_what_the_old_one_had_of_an_answer(tmp_path: Path) -> None:
    api = Api(chats=[[delta("old"), GATE], [delta("new"), DONE]])
    script = """
    await send("first");
    await until(() => turns().at(-1) === "old");
    $("clear").click();
    await answered();
    await send("second");
    await until(() => turns().at(-1) === "new");
    await report(turns());
    """
    assert run(api, script, tmp_path) == ["second", "new"]
    assert api.asked[1]["messages"] == [{"role": "user", "content": "second"}]


def test_an_error_of_a_proxy_is_told_by_its_status(tmp_path: Path) -> None:
    api = Api(chats=[Response("<html>503 Service Unavailable</html>", 503)])
    script = """
    await send("hello");
    await answered();
    await report(turns());
    """
    assert run(api, script, tmp_path)[1].endswith("status 503.")


@pytest.mark.parametrize("end", ["", 'data: {"error": {"message": "The connection ended before the answer did."}}\n\n'])
def test_an_answer_without_its_end_is_told_from_a_whole_one(tmp_path: Path, end: str) -> None:
    api = Api(chats=[[delta("half an"), end]])
    script = """
    await send("hello");
    await answered();
    await report([turns().at(-1), document.querySelectorAll(".turn.error").length]);
    """
    assert run(api, script, tmp_path) == ["half an\nThe connection ended before the answer did.", 1]


def test_whoever_reads_the_beginning_of_an_answer_is_left_there(tmp_path: Path) -> None:
    page_full = delta("line\\n" * 200)
    api = Api(chats=[[page_full, DONE], [page_full, GATE, delta("more"), DONE]])
    script = """
    await send("hello");
    await answered();
    const followed = $("log").scrollTop;
    await send("again");
    await until(() => turns().at(-1));
    $("log").scrollTop = 5;
    await go();
    await answered();
    await report([followed > 1000, $("log").scrollTop]);
    """
    assert run(api, script, tmp_path) == [True, 5]


def test_the_chat_does_not_wait_for_the_timeline(tmp_path: Path) -> None:
    api = Api(chats=[[delta("one"), DONE], [delta("two"), DONE]], has_no_timelines=True)
    script = """
    await send("hello");
    await answered();
    await send("again");
    await answered();
    await report(turns());
    """
    assert run(api, script, tmp_path) == ["hello", "one", "again", "two"]


def test_figures_of_a_server_that_is_gone_are_not_shown_on(tmp_path: Path) -> None:
    api = Api(metrics=[Response(RUNNING), Response("<html>", 503), Response(RUNNING)])
    script = """
    await until(() => figures().includes("1 / 0"));
    await until(() => figures().includes("status 503"));
    const gone = [figures().includes("1 / 0"), $("server").textContent];
    await until(() => figures().includes("1 / 0"));
    await report(gone);
    """
    assert run(api, script, tmp_path) == [False, ""]


def test_figures_begin_anew_with_a_server_that_has_restarted(tmp_path: Path) -> None:
    """Its answers of 10 ms were shown as 1 s: what its predecessor had counted was subtracted."""
    api = Api(metrics=[first_tokens(100, 0), first_tokens(5, 100), first_tokens(9, 100)])
    script = """
    await until(() => figures().includes("≤"));
    await report($("live").querySelector("dd").textContent);
    """
    assert run(api, script, tmp_path) == "≤ 10 ms / ≤ 10 ms"


def test_series_of_thousands_of_adapters_are_not_kept(tmp_path: Path) -> None:
    """They took 6 MB for each scrape, of which thirty are kept."""
    series = 'antiphon:name_tokens_total{{gateway="g",kind="input",model_name="adapter-{}"}} 1.0\n'
    api = Api(metrics=[Response(RUNNING + "".join(map(series.format, range(50_000))))])
    script = """
    const before = performance.memory.usedJSHeapSize;
    await until(() => figures().includes("1 / 0"));
    gc();
    await report(performance.memory.usedJSHeapSize - before);
    """
    grown = run(api, script, tmp_path, "--enable-precise-memory-info", "--js-flags=--expose-gc")
    assert grown < 5e6


def test_models_that_come_while_the_page_is_open_are_listed(tmp_path: Path) -> None:
    """The page of a server that was just starting had none until it was loaded again."""
    more = JSONResponse(
        {"data": [{"id": "base", "task": "generate"}, {"id": "mine", "parent": "base", "task": "generate"}]}
    )
    api = Api(models=[Response("<html>", 503), MODELS, more])
    script = """
    await until(() => models().length);
    const before = [models(), $("key").placeholder];
    $("model").focus();
    await until(() => models().length > 1);
    await report([...before, models()]);
    """
    assert run(api, script, tmp_path) == [["base"], "not required", ["base", "mine (adapter of base)"]]


def test_a_key_that_is_needed_or_wrong_is_told(tmp_path: Path) -> None:
    refused = JSONResponse({"error": {"message": "No."}}, 401)
    script = """
    await until(() => models().length);
    const without = models();
    $("key").value = "wrong";
    $("key").dispatchEvent(new Event("change"));
    await until(() => models()[0] !== without[0]);
    await report([without, models(), $("ask").checkValidity()]);
    """
    told = run(Api(models=[refused]), script, tmp_path)
    assert told == [["an API key is required"], ["the API key is wrong"], False]


def test_the_longest_names_fit_into_the_narrowest_window(tmp_path: Path) -> None:
    """They made a page of 1,774 pixels."""
    longest = JSONResponse({"data": [{"id": LONGEST_NAME, "parent": LONGEST_NAME, "task": "generate"}]})
    api = Api(models=[longest], metrics=[Response(RUNNING)], chats=[[delta("w" * 300), DONE]])
    script = """
    if (parent === window) {
      const frame = Object.assign(document.createElement("iframe"), { width: 320, src: "/" });
      document.body.replaceChildren(frame);
    } else {
      await until(() => models().length && $("server").children.length);
      await send("hello");
      await until(() => $("timeline").querySelector(".stage"));
      const width = document.documentElement.scrollWidth;
      frameElement.width = 520;
      await until(() => innerWidth > 400);
      await report([width, document.querySelector("header").clientHeight]);
    }
    """
    width, height = run(api, script, tmp_path)
    assert width <= 320
    # The figures stood below each other, in a column of a fifth of a window of 520 pixels.
    assert height < 200
