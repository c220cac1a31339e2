"""Whether indexes of a Lance table answer as a scan does. Reads only; needs a pylance handle and names, no ``Table``.

So that a version which is not published yet (a detached one) can be asked in the same way.
"""
