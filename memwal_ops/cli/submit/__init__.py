"""Programs for ``spark-submit``, in a separate folder, because Python puts a program's folder first in ``sys.path``."""
