"""The page of a report: `page(report)` is one HTML file with everything inside."""

from .page import page as page
