# The whole of CI is `.ci/run`; these are its parts, for a developer in an environment with `pip install -e ".[test]"`.
.PHONY: check lint types test bench wheel

check: lint types test

lint:
	ruff check .
	ruff format --check .

types:  # on a built copy: type checkers do not follow the namespace mapping of an editable install
	rm -rf build/lib build/check
	pip install --quiet --no-deps --target build/check .
	cd build/check && mypy --config-file ../../pyproject.toml align

test:
	pytest

bench:
	python -m bench.capture
	python -m bench.compare --quick
	python -m bench.bisect

wheel:
	pip wheel --no-deps --wheel-dir build/wheel .
