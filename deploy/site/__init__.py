"""The documentation as a site; see mkdocs.yml."""
