"""The page in a real browser: typing, keys, copying, images. Skipped where there is no Chromium."""

import shutil
import threading

import pytest
from PIL import Image

from tests.clip.colour_gallery import HOSTILE, colour_gallery
from unisono_models.clip.commands.serve import SearchServer

selenium = pytest.importorskip("selenium", reason="drives the browser: pip install selenium")
CHROMIUM, DRIVER = (shutil.which(name, path="/usr/bin:/usr/local/bin") for name in ("chromium", "chromedriver"))
if not CHROMIUM or not DRIVER:
    pytest.skip("needs a browser: apt install chromium chromium-driver", allow_module_level=True)

from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1000,900"),
)
DROP = """
const [bytes, kind] = arguments, carried = new DataTransfer();
carried.items.add(new File([new Uint8Array(bytes)], "dropped", { type: kind }));
document.dispatchEvent(new DragEvent("drop", { dataTransfer: carried, bubbles: true, cancelable: true }));
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def server():
    gallery, clip = colour_gallery()
    with SearchServer(gallery, port=0) as server:
        server.clip = clip
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def page(browser, server):
    browser.get("about:blank")
    browser.get(server.address)
    browser.get_log("browser")
    return Page(browser)


class Page:
    """What one sees and does."""

    def __init__(self, browser):
        self.browser = browser
        self.words = browser.find_element(By.ID, "words")

    def wait(self, what):
        return WebDriverWait(self.browser, 20, poll_frequency=0.02).until(lambda _: what())

    def names(self):
        """In one script: what is listed may be replaced between two questions."""
        return self.browser.execute_script("return [...document.querySelectorAll('.card .name')].map(each => each.textContent)")

    def focus(self):
        return self.browser.execute_script(
            "const at = document.activeElement; return at.id || at.querySelector('.name')?.textContent"
        )

    def press(self, key):
        self.browser.switch_to.active_element.send_keys(key)
        return self.focus()

    def said(self):
        return self.browser.find_element(By.ID, "said").text

    def drop(self, content, kind="image/png"):
        self.browser.execute_script(DROP, list(content), kind)

    def complaints(self):
        return [entry for entry in self.browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def test_results_appear_while_one_types(page):
    assert page.wait(lambda: page.browser.title) == "Type words, get emoji" and page.names() == []
    page.words.send_keys("orange")
    page.wait(lambda: page.names()[:3] == ["orange heart", "yellow heart", "red heart"])
    loaded = (
        "return [...document.images].filter(each => each.closest('.card')).every(each => each.complete && each.naturalWidth)"
    )
    page.wait(lambda: page.browser.execute_script(loaded))
    page.words.send_keys(Keys.BACKSPACE * 6 + "blue")
    page.wait(lambda: page.names()[0] == "blue heart")
    page.words.clear()
    page.words.send_keys("x" + Keys.BACKSPACE)
    page.wait(lambda: page.names() == [])
    assert page.complaints() == []


def test_typing_fast_searches_once(page, server):
    before = len(server.clip.read)
    page.browser.execute_script(
        """for (const text of ["g", "gr", "gre", "gree", "green blue"]) {
          arguments[0].value = text; arguments[0].dispatchEvent(new Event("input")); }""",
        page.words,
    )
    page.wait(page.names)
    assert server.clip.read[before:] == ["green blue"]


def test_keys_reach_everything(page):
    page.words.send_keys("red")
    page.wait(lambda: len(page.names()) == 6)
    names = page.names()
    assert page.press(Keys.ARROW_DOWN) == names[0]
    assert page.press(Keys.ARROW_RIGHT) == names[1]
    assert page.press(Keys.END) == names[-1] and page.press(Keys.ARROW_RIGHT) == names[-1] and page.press(Keys.HOME) == names[0]
    assert page.press(Keys.ARROW_UP) == "words"
    page.press(Keys.ARROW_DOWN)
    page.press(Keys.ENTER)
    page.wait(lambda: page.said() == "Copied ❤️")
    assert page.press("/") == "words"
    page.press(Keys.TAB)
    assert page.focus() == "vendor" and page.press(Keys.TAB) == "pick" and page.press(Keys.TAB) == names[0]
    assert page.press(Keys.ESCAPE) == "words" and page.names() == names
    page.press(Keys.ESCAPE)
    page.wait(lambda: page.names() == [])
    assert page.complaints() == []


def test_everything_has_a_name_for_those_who_do_not_see(page):
    page.words.send_keys("red")
    page.wait(page.names)
    found = page.browser.find_elements(By.CSS_SELECTOR, "input:not([hidden]), select, button")
    names = [element.accessible_name for element in found if element.is_displayed()]
    assert all(names) and "What to look for" in names and "Drawn by" in names, names
    assert any(name.startswith("red heart, score 0.9") and name.endswith("Copy the emoji") for name in names)
    roles = {element.aria_role for element in page.browser.find_elements(By.CSS_SELECTOR, "form, #status, #cards")}
    assert roles == {"search", "status", "list"}


def test_page_shows_some_of_the_images_before_the_first_search(page):
    samples = "return [...document.querySelectorAll('#samples button')].filter(e => e.checkVisibility()).map(e => e.title)"
    shown = page.wait(lambda: page.browser.execute_script(samples))
    assert shown[:2] == ["red heart", "orange heart"] and "hand: dark skin tone" not in shown
    page.browser.find_element(By.CSS_SELECTOR, "#samples li:nth-child(2) button").click()
    page.wait(page.names)
    assert page.names()[0] == "orange heart" and page.browser.execute_script(samples) == []


def test_examples_and_vendors(page):
    page.wait(lambda: page.browser.find_element(By.ID, "vendor").is_displayed())
    page.browser.find_element(By.CSS_SELECTOR, "#examples button").click()
    page.wait(page.names)
    assert page.words.get_attribute("value") == "a cat in love" and page.focus() == "words"
    vendors = "return [...document.querySelectorAll('.tile img')].map(each => each.title)"
    assert set(page.browser.execute_script(vendors)) == {"plain", "bold"}
    page.browser.find_element(By.CSS_SELECTOR, "#vendor option[value=bold]").click()
    page.wait(lambda: page.browser.execute_script(vendors) == ["bold"] * 5)


def test_page_searches_by_image(page, tmp_path):
    Image.new("RGB", (50, 40), "blue").save(tmp_path / "blue.png")
    Image.new("RGB", (50, 40), "lime").save(tmp_path / "green.png")
    page.drop((tmp_path / "blue.png").read_bytes())
    page.wait(lambda: page.names()[:1] == ["blue heart"])
    assert page.browser.find_element(By.ID, "asked").is_displayed() and page.said() == "looks like these"
    page.browser.find_element(By.ID, "file").send_keys(str(tmp_path / "green.png"))
    page.wait(lambda: page.names()[:1] == ["green heart"])
    page.words.send_keys("red")
    page.wait(lambda: page.names()[:1] == ["red heart"])
    assert not page.browser.find_element(By.ID, "asked").is_displayed() and page.complaints() == []


def test_what_is_wrong_is_said(page):
    page.drop(b"words", "text/plain")
    page.wait(lambda: page.said() == "That is not an image.")
    page.drop(b"words", "image/png")
    page.wait(lambda: page.said() == "this file cannot be read as an image")
    page.browser.execute_script("window.fetch = () => Promise.reject(new TypeError())")
    page.words.send_keys("red")
    page.wait(lambda: "Is it still running?" in page.said())


def test_hostile_names_are_only_text(page):
    page.words.send_keys("blue")
    page.wait(lambda: HOSTILE in page.names())
    assert page.browser.find_elements(By.CSS_SELECTOR, "img[src=x]") == [] and page.complaints() == []


def test_the_address_carries_the_words(page, server):
    page.words.send_keys("yellow & red")
    page.wait(lambda: page.browser.current_url == server.address + "#yellow%20%26%20red")
    page.browser.refresh()
    page.words = page.browser.find_element(By.ID, "words")
    page.wait(lambda: page.names()[:1] == ["orange heart"])
    assert page.words.get_attribute("value") == "yellow & red"
