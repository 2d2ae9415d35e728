package main

import (
	"context"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/health" // for healthCheckConfig of the service config
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

// connect returns a connection to a server, or to all replicas behind a name: "dns:///meshserve:50051".
// ca is the PEM file of the authority that signed the server's certificate, tokenFile contains the token; "" for none.
func connect(target, ca, tokenFile string) (*grpc.ClientConn, error) {
	config, err := os.ReadFile("protos/service_config.json")
	if err != nil {
		return nil, err
	}
	transport := insecure.NewCredentials()
	if ca != "" {
		if transport, err = credentials.NewClientTLSFromFile(ca, ""); err != nil {
			return nil, err
		}
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithDefaultServiceConfig(string(config)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16 << 20)),
	}
	if tokenFile != "" {
		token, err := os.ReadFile(tokenFile)
		if err != nil {
			return nil, err
		}
		options = append(options, grpc.WithPerRPCCredentials(bearer(strings.TrimSpace(string(token)))))
	}
	return grpc.NewClient(target, options...)
}

// bearer is a token that is sent with every call.
type bearer string

func (token bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(token)}, nil
}

func (token bearer) RequireTransportSecurity() bool { return false }

// detailsOf returns what the server says about an error beyond its code and message: the request field at fault, and how
// long to wait before a retry; "" and nil if it says nothing.
func detailsOf(err error) (field string, retry *time.Duration) {
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.BadRequest:
			if violations := detail.GetFieldViolations(); len(violations) > 0 {
				field = violations[0].GetField()
			}
		case *errdetails.RetryInfo:
			delay := detail.GetRetryDelay().AsDuration()
			retry = &delay
		}
	}
	return field, retry
}
