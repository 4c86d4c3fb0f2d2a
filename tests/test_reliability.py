"""RELIABILITY.md is what the JSON files say, and names tests that exist."""

from pathlib import Path
from xml.etree import ElementTree

import reliability

REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure>no</failure></testcase><testcase name="c"><skipped/></testcase>
<testcase name="d"><properties>
<property name="saving" value="4"/><property name="training" value="6"/>
</properties></testcase>
<testcase name="e"><properties><property name="saving" value="1"/></properties><error>no</error></testcase>
</testsuite></testsuites>"""


def test_the_document_is_generated_from_the_figures() -> None:
    assert reliability.DOCUMENT.read_text("utf-8") == reliability.document()


def test_every_class_names_tests_that_exist(repository: Path) -> None:
    for fault_class in reliability.CLASSES.values():
        for test in fault_class.tests:
            file, _, function = test.partition("::")
            assert f"def {function}" in (repository / file).read_text("utf-8"), test


def test_cases_are_tests_or_what_they_recorded() -> None:
    counts = reliability.counts(ElementTree.fromstring(REPORT))
    assert counts == {"cases": 13, "failures": 2, "skipped": 1, "details": {"saving": 5, "training": 6}}
