"""The live page in Debian's chromium, headless: what an operator sees, also by keyboard, on a phone, in the dark."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from playwright.sync_api import Browser, expect, sync_playwright

from agent.console.http import app
from agent.console.sockets import node_name
from agent.console.views import Note, Status
from tests.console.http import nodes
from tests.console.http.browsing import MILLISECONDS, Node, Visit, fallen, well
from tests.needs import CHROMIUM, skip_without

EXPECTED_WHILE_LOST = "Failed to load resource: net::ERR_"


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(app, "_COALESCE", 0.0)
    it = Node()
    it.start()
    try:
        yield it
    finally:
        it.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    skip_without("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=MILLISECONDS)
        expect.set_options(timeout=MILLISECONDS)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Browser, node: Node) -> Iterator[Visit]:
    it = Visit(chromium, node, viewport={"width": 1280, "height": 900})
    yield it
    it.leave()


GPU = "H100 · nvidia3"


def test_a_gpu_fails_and_recovers_without_a_reload(node: Node, visit: Visit) -> None:
    page = visit.page
    node.show(well())
    expect(page.locator("#verdict")).to_contain_text("All is well")
    node.show(fallen(), nodes.EVENTS[2])
    expect(page.locator("#verdict")).to_contain_text("1 of 8 devices is unhealthy")
    expect(page.locator("#attention")).to_contain_text("nvidia.com/gpu: xid-79")
    expect(page.locator("#attention")).to_contain_text("fallen off the bus")
    expect(page.locator("#attention")).to_contain_text("Held by training/notebook-7d9f")
    expect(page.locator(".device.unhealthy")).to_have_count(1)
    expect(page.locator("#events li").first).to_contain_text("xid-79")
    expect(page.locator("#events li").first.get_by_text(GPU)).to_have_attribute("title", nodes.gpu(3).key)
    expect(page).to_have_title("1 of 8 devices is unhealthy · Fairlead " + node_name())
    node.show(well())
    expect(page.locator("#attention")).to_have_text("Nothing.")
    expect(page.locator(".device.unhealthy")).to_have_count(0)
    assert visit.loads == 1


def test_a_device_comes_and_goes_in_its_place(node: Node, visit: Visit) -> None:
    gpus = nodes.gpus()
    node.show(nodes.node(replace(gpus, devices=gpus.devices[:-1])))
    expect(visit.page.locator(".tile")).to_have_count(7)
    node.show(well())
    expect(visit.page.get_by_label("NUMA node 1").locator(".tile")).to_have_count(4)
    expect(visit.page.locator(".tile .title")).to_have_count(8)


def test_a_device_whose_place_changes_keeps_what_is_in_it(node: Node, visit: Visit) -> None:
    page = visit.page
    node.show(well())
    expect(page.locator("#verdict")).to_contain_text("All is well")
    page.locator(".device > summary", has_text=GPU).click()
    gpus = nodes.gpus()
    elsewhere = [replace(gpu, numa_node=1 - (gpu.numa_node or 0)) for gpu in gpus.devices]
    node.show(nodes.node(replace(gpus, devices=tuple(elsewhere)), nodes.vfs()))
    expect(page.get_by_label("NUMA node 1").locator(".tile .title", has_text=GPU)).to_have_count(1)
    expect(page.locator(".tile .title")).to_have_count(136)
    expect(page.locator(".device[open]")).to_contain_text(GPU)
    expect(page.locator(".device > summary", has_text=GPU)).to_be_focused()


def test_devices_below_one_switch_stand_side_by_side_and_name_their_bridges_when_opened(visit: Visit) -> None:
    pair = visit.page.get_by_label("NUMA node 0").locator(".place").last
    assert pair.locator(".title").all_inner_texts() == ["H100 · nvidia2", GPU]
    assert pair.locator(".tile").evaluate_all("it => new Set(it.map(it => it.getBoundingClientRect().top)).size") == 1
    bridges = pair.get_by_text("pci0000:38 › 0000:38:00.0 › 0000:39:00.0").last
    expect(bridges).to_be_hidden()
    pair.locator("summary").last.click()
    expect(bridges).to_be_visible()


@pytest.mark.parametrize(
    "shown",
    [
        nodes.node(nodes.gpus(), nodes.hcas()),
        nodes.node(nodes.gpus(**nodes.FALLEN), nodes.hcas()),
        nodes.node(nodes.gpus(), nodes.hcas(), unclaimed=(nodes.unusable(8), nodes.unusable(9))),
    ],
    ids=["all is well", "one has fallen off", "two have no driver"],
)
def test_a_server_of_eight_gpus_and_adapters_is_seen_on_one_screen(node: Node, visit: Visit, shown: Status) -> None:
    visit.page.set_viewport_size({"width": 1280, "height": 800})
    node.show(shown)
    expect(visit.page.get_by_text("ConnectX-7 · mlx5_7")).to_be_visible()
    for tile in visit.page.locator(".tile").all():
        expect(tile).to_be_in_viewport(ratio=1)


def test_ten_troubles_are_a_line_each_above_the_devices_and_one_that_is_opened_stays_so(
    node: Node, visit: Visit
) -> None:
    visit.page.set_viewport_size({"width": 1280, "height": 800})
    node.show(nodes.broken())
    troubles = visit.page.locator(".troubles > li")
    expect(troubles).to_have_count(10)
    expect(visit.page.locator("#verdict")).to_contain_text("3 of 16 devices are unhealthy, 3 not offered")
    for tile in visit.page.locator(".tile").all():
        expect(tile).to_be_in_viewport(ratio=1)
    port = troubles.filter(has_text="port-down")
    expect(port).to_contain_text("mlx5_2, mlx5_6")
    expect(port.get_by_role("link")).to_have_count(0)
    port.locator("summary").first.click()
    expect(port.get_by_role("link", name="ConnectX-7 · mlx5_6")).to_be_visible()
    node.show(nodes.broken(), replace(nodes.EVENTS[2], number=9, message="news"))
    expect(visit.page.locator("#events")).to_contain_text("news")
    expect(port.get_by_role("link", name="ConnectX-7 · mlx5_6")).to_be_visible()


def test_an_opened_device_says_what_ends_its_trouble_and_what_happened_beside(node: Node, visit: Visit) -> None:
    page = visit.page
    gpus = nodes.gpus(**nodes.FALLEN, ends="a reboot or `fairlead undrain`")
    node.daemon.notes = (
        Note(
            nodes.gpu(0).hardware[0], "xid-31", "MMU fault", nodes.NOW - 60, 3, 4711, "python3", ("training/llama-0",)
        ),
    )
    node.show(nodes.node(gpus))
    fallen, noted = (page.locator(".device", has=page.get_by_text(f"H100 · nvidia{n}", exact=True)) for n in (3, 0))
    expect(fallen).to_contain_text("With a new binding of its driver, a reset by Fairlead, a reboot, or")
    expect(fallen.locator(".advice code")).to_contain_text("systemctl reboot")
    expect(page.locator("#attention").locator("summary .glance", has_text="Move the node's pods away")).to_be_visible()
    expect(noted.locator("summary")).to_contain_text("noted: xid-31")
    noted.locator("summary").click()
    expect(noted.locator(".notes")).to_contain_text("xid-31, 3 times, process 4711 (python3), of training/llama-0")
    expect(fallen.locator(".notes")).to_have_count(0)


def test_what_no_pod_can_get_stands_hatched_in_its_place_with_its_reason(node: Node, visit: Visit) -> None:
    page, gpus = visit.page, nodes.gpus()
    node.show(nodes.node(replace(gpus, devices=gpus.devices[:5] + gpus.devices[6:]), unclaimed=(nodes.unusable(5),)))
    expect(page.locator("#verdict")).to_contain_text("1 of 8 devices is not offered")
    expect(page.locator("#verdict")).to_contain_text("8 devices of 1 resource")
    tile = page.get_by_label("NUMA node 1").locator(".place").first.locator(".tile").last
    expect(tile).to_contain_text("H100 · nvidia5")
    expect(tile.locator("summary .reason")).to_have_text("it has no driver; nvidia is needed")
    assert "gradient" in tile.locator(".device").evaluate("it => getComputedStyle(it).backgroundImage")
    page.locator("#attention").get_by_role("link", name="H100 · nvidia5").click()
    expect(tile.locator("summary")).to_be_focused()
    expect(tile.locator(".more")).to_contain_text(nodes.gpu(5).hardware[0])


def test_what_is_gone_leaves_its_outline(node: Node, visit: Visit) -> None:
    gpus, went = nodes.gpus(), replace(nodes.unusable(5, "it is not there any more"), reason="gone")
    node.show(nodes.node(replace(gpus, devices=gpus.devices[:5] + gpus.devices[6:]), unclaimed=(went,)))
    tile = visit.page.get_by_label("NUMA node 1").locator(".place").first.locator(".tile").last
    expect(tile).to_contain_text("it is not there any more")
    drawn = tile.locator(".device").evaluate(
        "it => { const s = getComputedStyle(it); return [s.borderStyle, s.backgroundImage]; }"
    )
    assert drawn == ["dashed", "none"]


def test_places_of_one_kind_are_equally_wide(node: Node, visit: Visit) -> None:
    gpus = nodes.gpus()
    apart = [
        replace(gpu, numa_node=0, ancestry=(f"pci0000:{n // 2}0", f"0000:{n // 2}0:01.0"))
        for n, gpu in enumerate(gpus.devices)
    ]
    node.show(nodes.node(replace(gpus, devices=tuple(apart))))
    expect(visit.page.locator(".place")).to_have_count(4)
    widths = visit.page.locator(".place").evaluate_all(
        "it => it.map(it => Math.round(it.getBoundingClientRect().width))"
    )
    assert len(set(widths)) == 1


def test_by_keyboard(visit: Visit) -> None:
    page = visit.page
    expect(page.locator("#verdict")).to_contain_text("1 of 8")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to what needs attention")).to_be_focused()
    expect(page.get_by_role("link", name="Skip to what needs attention")).to_be_in_viewport()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.locator(".troubles summary.title")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name=GPU)).to_be_focused()
    page.keyboard.press("Enter")  # the link opens the device, and goes there
    summary = page.locator(".device.unhealthy > summary")
    expect(summary).to_be_focused()
    expect(page.locator(".device.unhealthy .more")).to_be_visible()
    assert summary.evaluate("it => getComputedStyle(it).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator(".device.unhealthy .more")).to_be_hidden()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    expect(page.locator(".device[open]")).to_contain_text("H100 · nvidia2")
    page.keyboard.press("Escape")
    expect(page.locator(".device[open]")).to_have_count(0)


def test_what_is_open_and_focused_stays_so_when_it_changes(node: Node, visit: Visit) -> None:
    page = visit.page
    node.show(well())
    expect(page.locator("#verdict")).to_contain_text("All is well")
    summary = page.locator(".device > summary", has_text=GPU)
    summary.focus()
    page.keyboard.press("Enter")
    node.show(nodes.node(nodes.gpus(**nodes.FALLEN), nodes.kvm()))
    expect(page.locator(".device[open]")).to_contain_text("fallen off the bus")
    expect(summary).to_be_focused()


def test_what_a_screen_reader_is_told(node: Node, visit: Visit) -> None:
    page = visit.page
    node.show(nodes.busy())
    expect(page.get_by_role("main")).to_be_visible()
    expect(page.get_by_role("navigation", name="Sections")).to_be_visible()
    for name in ("Needs attention", "Resources", "Devices in their place", "Recent events"):
        expect(page.get_by_role("region", name=name, exact=True)).to_be_attached()
    expect(page.get_by_role("row", name="nvidia.com/gpu")).to_contain_text("registered")
    expect(page.locator(".device.healthy .state").first).to_have_text("Healthy")
    expect(page.get_by_role("meter", name="kvm: share in use")).to_be_attached()
    expect(page.locator("#verdict")).to_have_attribute("aria-live", "polite")


def test_on_a_phone_nothing_is_wider_than_the_screen(chromium: Browser, node: Node) -> None:
    visit = Visit(chromium, node, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    kvm, vfs = nodes.node(nodes.kvm(1000, 1000)), nodes.node(nodes.vfs(128, 128))
    for shown, tiles in ((kvm, 1), (vfs, 128), (nodes.busy(), 137)):
        node.show(shown)
        expect(visit.page.locator(".tile .title")).to_have_count(tiles)
        visit.page.evaluate("document.querySelectorAll('details').forEach(it => it.open = true)")
        assert visit.page.evaluate("document.documentElement.scrollWidth") == 360
        too_wide = (
            "[...document.querySelectorAll('body *')].filter(it => it.getBoundingClientRect().right > 361).length"
        )
        assert visit.page.evaluate(too_wide) == 0
    visit.leave()


def test_no_number_and_no_heading_is_broken_in_two(node: Node, visit: Visit) -> None:
    long = f"hardware.example.com/{'an-accelerator-' * 4}one"
    node.show(nodes.node(replace(nodes.gpus(), name=long), replace(nodes.kvm(1000, 1000), name=long[:-3])))
    expect(visit.page.locator("#resources tbody tr")).to_have_count(2)
    lines = "cells => Math.max(...cells.map(it => it.getBoundingClientRect().height)) / 21.75"  # 15px/1.45
    for width in (1280, 360, 320):
        visit.page.set_viewport_size({"width": width, "height": 740})
        assert visit.page.locator("#resources .number").evaluate_all(lines) < (3 if width > 640 else 2.1)
        assert visit.page.locator("#resources thead th").evaluate_all(lines) < (2 if width > 640 else 99)
        assert visit.page.evaluate("document.documentElement.scrollWidth") == width


def test_text_stands_out_in_light_and_dark(node: Node, visit: Visit) -> None:
    went = replace(nodes.unusable(9), reason="gone")
    node.show(replace(nodes.busy(), unclaimed=(nodes.unusable(8), went)))
    expect(visit.page.locator(".tile .title")).to_have_count(139)
    visit.page.evaluate("document.querySelectorAll('details').forEach(it => it.open = true)")
    visit.page.emulate_media(color_scheme="light")
    light, poorest_in_light = visit.page.evaluate(_CONTRAST)
    visit.page.emulate_media(color_scheme="dark")
    dark, poorest_in_dark = visit.page.evaluate(_CONTRAST)
    assert light != dark == "rgb(15, 18, 22)"
    for poorest in (poorest_in_light, poorest_in_dark):
        assert poorest["ratio"] >= 4.5, poorest  # WCAG 2.2, 1.4.3


def test_the_connection_is_lost_and_comes_back(chromium: Browser, node: Node) -> None:
    visit = Visit(chromium, node, manual_clock=True, viewport={"width": 1280, "height": 900})
    page = visit.page
    expect(page.locator("#live")).to_have_text("Live")
    node.stop()
    expect(page.locator("#live")).to_contain_text("Disconnected since")
    expect(page.locator("#live")).to_be_in_viewport()
    expect(page).to_have_title(re.compile("^Disconnected"))
    node.daemon.shown = well()
    node.start()
    page.clock.run_for(2_000)  # milliseconds, after which it tries again
    expect(page.locator("#live")).to_have_text("Live")
    expect(page.locator("#verdict")).to_contain_text("All is well")
    assert visit.loads == 1
    visit.complaints[:] = [it for it in visit.complaints if not it.startswith(EXPECTED_WHILE_LOST)]
    visit.leave()


def test_a_click_on_a_moment_of_the_strip_leads_to_what_happened_then_and_on_to_its_events(visit: Visit) -> None:
    page = visit.page
    page.locator(".device.unhealthy > summary").click()
    strip = page.locator(".device.unhealthy .strip")
    width = strip.evaluate("it => it.getBoundingClientRect().width")
    strip.click(position={"x": 0.55 * width, "y": 12})
    expect(page.locator(".past li:target")).to_contain_text("Degraded, pcie-width, held by training/llama-1")
    expect(page.locator(".past li:target")).to_be_in_viewport()
    strip.click(position={"x": width - 1, "y": 12})
    expect(page.locator(".past li:target")).to_contain_text("Unhealthy, xid-79")
    page.locator(".past li:target").get_by_role("link").click()
    expect(page.locator("#events li:target")).to_contain_text("fallen off the bus")


def test_a_strip_is_for_the_eye_alone_and_what_never_changed_has_none(visit: Visit) -> None:
    page = visit.page
    page.locator(".device.unhealthy > summary").click()
    expect(page.locator(".past li")).to_have_count(8)
    page.keyboard.press("Tab")
    expect(page.locator(".past li a").first).to_be_focused()  # not one of the strip's parts
    page.locator(".device > summary", has_text="nvidia4").click()
    expect(page.locator(".device[open]", has_text="nvidia4")).to_contain_text(
        "nothing happened to it while Fairlead ran"
    )
    expect(page.locator(".strip")).to_have_count(1)


def test_a_thousand_tokens_are_one_tile(node: Node, visit: Visit) -> None:
    page = visit.page
    node.show(nodes.node(nodes.kvm(1000, 437)))
    expect(page.locator(".tile")).to_have_count(1)
    expect(page.locator(".tile")).to_contain_text("437 of 1,000 in use")
    page.locator(".device > summary").click()
    expect(page.locator(".more")).to_contain_text("kvm::0")
    expect(page.locator(".more")).to_contain_text("and 992 more")
    expect(page.locator(".more")).to_contain_text("and 417 more containers")


def test_128_virtual_functions_fit_on_two_screens(node: Node, visit: Visit) -> None:
    node.show(nodes.node(nodes.vfs()))
    expect(visit.page.locator(".tile .title")).to_have_count(128)
    height = visit.page.locator("#devices").bounding_box()
    assert height is not None
    assert height["height"] < 1800


def test_without_a_script_it_is_a_page_all_the_same(chromium: Browser, node: Node) -> None:
    node.daemon.shown = nodes.busy()
    page = chromium.new_page(java_script_enabled=False)
    page.set_default_timeout(MILLISECONDS)
    page.goto(node.url)
    expect(page.locator("#live")).to_contain_text("loads itself again every 30 s")
    expect(page.locator("#verdict")).to_contain_text("1 of 137 devices is unhealthy")
    page.locator(".device.unhealthy > summary").click()
    expect(page.locator(".device.unhealthy .more")).to_be_visible()
    page.close()


_CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((it) => it / 255)
    .map((it) => it <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4)
    .reduce((sum, it, n) => sum + it * [0.2126, 0.7152, 0.0722][n], 0);
  const grounds = (it) => { // with the lines of a hatched one
    for (; it; it = it.parentElement) {
      const { backgroundColor, backgroundImage } = getComputedStyle(it);
      const every = [backgroundColor, ...(backgroundImage.match(/rgba?\\([^)]*\\)/g) ?? [])].map(parse);
      if (every[0].length < 4 || every[0][3] > 0) return every.filter((color) => color.length < 4 || color[3] > 0);
    }
  };
  let poorest = { ratio: 99 };
  for (const it of document.querySelectorAll("body *")) {
    const own = [...it.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !it.getClientRects().length) continue;
    for (const ground of grounds(it)) {
      const [a, b] = [light(parse(getComputedStyle(it).color)), light(ground)].sort((x, y) => y - x);
      const ratio = (a + 0.05) / (b + 0.05);
      if (ratio < poorest.ratio) poorest = { ratio, text: it.textContent, name: it.className };
    }
  }
  return [getComputedStyle(document.body).backgroundColor, poorest];
}"""
