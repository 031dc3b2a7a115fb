"""``python -m tgi_cli.kernels``: compile the kernels where the installation puts them."""

from tgi_cli.kernels.build import INSTALLED, build

if __name__ == "__main__":
    for path in build(INSTALLED).values():
        print(path)
