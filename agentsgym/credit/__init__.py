"""Who is paid for what: turn rewards onto tokens (``rewards``), and from them to advantages (``advantages``)."""
