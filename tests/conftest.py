"""Eight virtual devices for every test (the flag counts only if it is set before JAX starts), and tables that tests
leave for the end of the output by `record_property("table", text)`, whichever process they ran in."""

import os

FLAG = "--xla_force_host_platform_device_count=8"
if FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()


def pytest_terminal_summary(terminalreporter):
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, text in getattr(report, "user_properties", ()):
                if name == "table" and report.when == "call":
                    terminalreporter.write_line(text)
