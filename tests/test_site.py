"""The documentation site and its pictures: what they show comes from the files, and a broken link breaks the build."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from tools.pictures import __main__ as pictures
from tools.pictures import memory, roofline, running
from tools.website import built, markdown, reference

import stream_attention

ROOT = Path(__file__).resolve().parents[1]
PAGES = [page for pattern in ("*.md", "docs/*.md", "learn/**/*.md") for page in sorted(ROOT.glob(pattern))]


# Pictures


def test_the_pictures_are_what_the_results_files_say() -> None:
    assert pictures.main(["--check"]) == 0


def test_a_stale_picture_is_noticed_and_drawn_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures, "FOLDER", tmp_path / "pictures")
    assert pictures.main(["--check"]) == 1 and pictures.main([]) == 0 and pictures.main(["--check"]) == 0
    (tmp_path / "pictures" / "tiles.svg").write_text("<svg/>")
    (tmp_path / "pictures" / "forgotten.svg").write_text("<svg/>")
    capsys.readouterr()
    assert pictures.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert "tiles.svg is stale" in said and "forgotten.svg is stale" in said and "roofline" not in said


def test_every_picture_is_small_well_formed_and_shown_on_a_page() -> None:
    shown = "".join(page.read_text() for page in PAGES)
    for name, svg in pictures.drawn().items():
        ElementTree.fromstring(svg)
        assert len(svg) < 32_000 and "var(--" not in svg
        assert f"pictures/{name}" in shown, name


def test_the_running_max_and_sum_end_where_two_passes_do() -> None:
    last = running.steps()[-1]
    assert last.most == max(running.SCORES)
    assert last.total == pytest.approx(sum(math.exp(score - last.most) for score in running.SCORES))
    assert f"ends at {last.total:.3f}" in (ROOT / "docs/pictures.md").read_text()


def test_the_roofline_has_our_kernels_where_they_were_measured_and_nobody_above_the_roof() -> None:
    results = {name: pictures.results(f"h200/{name}") for name in ("forward", "backward", "decode")}
    most, bandwidth = roofline.roofs(results)
    assert round(most) == 949 and bandwidth == results["decode"]["read_bandwidth"]["tb_per_s"]
    dots = roofline.dots(results)
    cells = {cell["name"]: cell for cell in results["forward"]["cells"]}
    forward = [dot for dot in dots if dot.kind == "forward, Gluon"]
    assert [dot.tflops for dot in forward] == [cells[dot.name]["providers"]["gluon"]["tflops"] for dot in forward]
    assert [round(dot.intensity) for dot in forward] == [256, 512, 1024, 2048, 4096, 8192]  # length / 2
    assert len(dots) == 3 * 6 + len(results["decode"]["cells"])
    # A sum is no absolute limit: the best decode call read 1 % faster than it.
    assert all(dot.tflops < min(most, 1.02 * bandwidth * dot.intensity) for dot in dots)


def test_memory_grows_with_the_square_of_the_length_or_with_the_length() -> None:
    held = pictures.results("cpu/memory")
    sizes = {(row["way"], row["length"]): row for row in held["rows"]}
    for what in ("forward", "training"):
        for length in memory.LENGTHS[1:]:
            assert 3.8 < sizes["standard", length][what] / sizes["standard", length // 2][what] < 4.1
        assert sizes["streaming", 8192][what] < 2 * sizes["streaming", 4096][what]
    said = (ROOT / "docs/pictures.md").read_text()
    for way, first, last in (("standard", "2", "512"), ("streaming", "0.27", "2.6")):
        ends = [sizes[way, length]["forward"] / 2**20 for length in (512, 8192)]
        assert [f"{end:.2g}" for end in ends[:1]] == [f"{float(first):.2g}"] and f"{ends[1]:.3g}".startswith(last)
        assert f"{way} {first} to {last}" in said


def test_memory_measured_again_is_what_the_file_says() -> None:
    threads = torch.get_num_threads()
    try:
        again = {row["way"]: row for row in memory.measure((512,))["rows"]}
    finally:
        torch.set_num_threads(threads)
    for row in pictures.results("cpu/memory")["rows"]:
        if row["length"] == 512:
            for what in ("forward", "training"):
                assert again[row["way"]][what] == pytest.approx(row[what], rel=0.1), (row["way"], what)


# Markdown as code hosts read it


def test_lists_are_set_apart_and_indented_for_the_stricter_parser() -> None:
    read = "Text\n- one\n  more of it\n- two\n\n  of two\n  1. inner\n     ```bash\n     run\n     ```\nAfter"
    strict = "Text\n\n- one\n    more of it\n- two\n\n    of two\n    1. inner\n"
    assert markdown.lists_apart(read) == strict + "        ```bash\n        run\n        ```\nAfter"
    fenced = "```text\nText\n- no list\n  as it was\n```"
    assert markdown.lists_apart(fenced) == fenced


def test_links_are_found_in_markdown_and_html_but_not_in_code() -> None:
    text = 'See [a](a.md#b), <img src="c.svg">.\n```bash\n[no](no.md)\n```\n[d](d.py)'
    assert markdown.links(text) == ["a.md#b", "c.svg", "d.py"]
    new = markdown.relinked(text, lambda target: f"new/{target}")
    assert "(new/a.md#b)" in new and 'src="new/c.svg"' in new and "[no](no.md)" in new and "(new/d.py)" in new


# The built site


def test_links_without_an_end_are_found_in_a_built_site(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top"><a href="in/page.html#there">1</a> <a href="in/page.html#gone">2</a> <a href="lost.html">3</a>'
        '<a href="https://somewhere.org/">4</a><img src="https://somewhere.org/a.png">'
    )
    (tmp_path / "in" / "page.html").write_text('<h2 id="there"><a href="../index.html#top">back</a><a href="#nowhere">')
    assert sorted(built.broken(tmp_path)) == [
        "in/page.html links to #nowhere, but in/page.html has no such place",
        "index.html fetches https://somewhere.org/a.png",
        "index.html links to in/page.html#gone, but in/page.html has no such place",
        "index.html links to lost.html, which is not there",
    ]


def test_doctests_of_docstrings_become_code() -> None:
    pytest.importorskip("griffe")
    from tools.website.doctests import fenced

    assert fenced("Said.\n\n>>> 1 + 1\n2\n\nMore.") == "Said.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."


def test_the_reference_has_every_public_name_once() -> None:
    written = reference.pages(ROOT / "src")
    entries = re.findall(r"^::: (\S+)$", "\n".join(written.values()), re.MULTILINE)
    assert len(entries) == len(set(entries))
    names = {entry.rpartition(".")[2] for entry in entries}
    assert set(stream_attention.__all__) <= names


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the site is built with mkdocs, of the dev extra")
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


needs_site = pytest.mark.xdist_group("site")


@needs_site
def test_every_page_of_the_repository_is_a_page_of_the_site(site: Path) -> None:
    for page in PAGES:
        name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
        assert (site / page.relative_to(ROOT).parent / name).is_file(), page


@needs_site
def test_every_public_name_has_its_place_in_the_reference(site: Path) -> None:
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    places = set(re.findall(r'id="stream_attention\.(?:distributed\.|utils\.memory\.)?(\w+)"', pages))
    assert set(stream_attention.__all__) <= places
    assert "[B, Tq, Hq, D]" in pages and "&gt;&gt;&gt; " in pages


@needs_site
def test_search_has_the_pages_and_works_without_a_server(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"index.html", "docs/numerics.html", "DESIGN.html", "reference/functions.html"} <= found
    assert not [page for page in found if page.startswith(("src/", "examples/"))]  # code is shown, not searched
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")
    assert "docs/assets/iframe-worker.js" in (site / "index.html").read_text()


@needs_site
def test_code_that_a_page_links_to_is_a_page_too(site: Path) -> None:
    assert 'href="src/stream_attention/backends/reference/attention.py.html"' in (site / "index.html").read_text()
    assert "def attention" in re.sub(
        "<[^>]+>", "", (site / "src/stream_attention/backends/reference/attention.py.html").read_text()
    )


@needs_site
def test_a_broken_link_breaks_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("docs", "learn", "tools"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml"):
        shutil.copy(file, copy)
    for path in ROOT.iterdir():
        if not (copy / path.name).exists() and path.name not in (".git", "out"):
            (copy / path.name).symlink_to(path)
    with (copy / "SECURITY.md").open("a") as page:
        page.write("\n[lost](docs/no_such_page.md) and [nowhere](docs/api.md#no-such-place)\n")
    done = build(copy, tmp_path / "site")
    assert done.returncode != 0
    assert "docs/no_such_page.md" in done.stderr and "#no-such-place" in done.stderr
