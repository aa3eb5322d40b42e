"""The Flower ServerApp: configuration, nodes, plan, rounds, results."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run configuration asks for; a failure leaves its reason in the run directory."""
    from privet.errors import PrivetError
    from server_app.run import execute, open_run

    with open_run(context) as (directory, resumed):
        try:
            execute(grid, context, directory, resumed)
        except PrivetError as error:
            directory.fail(str(error))
            raise
        except Exception as error:
            directory.fail(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
            raise
