"""Tell results in the terminal, HTML, JUnit, JSON and Markdown; decides nothing."""
