//! Notices that the client left, whatever it sent before.
//!
//! hyper reads the socket only while it wants bytes, so a FIN behind a pipelined request, a stray
//! line end or an unread body stays unseen, and the dead client's request would wait for a slot
//! and take it. The kernel reports the FIN (EPOLLRDHUP) nevertheless. tokio keeps that in the
//! readiness of the stream it is already registered with; it never clears it, and a waiter for
//! `PRIORITY`, which these sockets never have, is woken by nothing else. So the watch needs no
//! second descriptor, is not woken by arriving bytes and can't spin.

use tokio::net::TcpStream;

/// Completes when the client closed its sending side or reset the connection.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(super) async fn gone(stream: &TcpStream) {
    // An error means that the runtime shuts down.
    let _ = stream.ready(tokio::io::Interest::PRIORITY).await;
}

/// Elsewhere only hyper's own detection works.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(super) async fn gone(_: &TcpStream) {
    std::future::pending().await
}
