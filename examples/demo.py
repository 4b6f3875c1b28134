"""The demo: `make demo`, or `palmette demo` where Palmette is installed."""

from palmette.lang.demo import main

if __name__ == "__main__":
    main()
