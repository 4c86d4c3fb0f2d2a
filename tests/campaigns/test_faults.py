"""RELIABILITY.md is what the JSON files say, and names tests that exist."""

import json
from pathlib import Path
from xml.etree import ElementTree

from campaigns import faults

REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure>no</failure></testcase><testcase name="c"><skipped/></testcase>
<testcase name="d"><properties>
<property name="saving" value="4"/><property name="training" value="6"/>
</properties></testcase>
<testcase name="e"><properties><property name="saving" value="1"/></properties><error>no</error></testcase>
</testsuite></testsuites>"""


def test_the_document_is_generated_from_the_figures() -> None:
    assert faults.DOCUMENT.read_text("utf-8") == faults.document()


def test_every_class_names_tests_that_exist_and_figures_that_are_whole(repository: Path) -> None:
    for name, fault_class in faults.CLASSES.items():
        for test in fault_class.tests:
            file, _, function = test.partition("::")
            assert f"def {function}" in (repository / file).read_text("utf-8"), test
        path = faults.FOLDER / f"{name}.json"
        if path.is_file():
            figures = json.loads(path.read_text("utf-8"))
            assert {"cases", "failures", "seconds", "commit", "command", "versions"} <= figures.keys()
            assert name in faults.OWN_CAMPAIGN or all(test in figures["command"] for test in fault_class.tests), name


def test_cases_are_tests_or_what_they_recorded() -> None:
    counts = faults.counts(ElementTree.fromstring(REPORT))
    assert counts == {"cases": 13, "failures": 2, "skipped": 1, "details": {"saving": 5, "training": 6}}
